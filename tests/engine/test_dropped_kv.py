"""Requests that drop their KV: slots, memory, disk and the hits of others are as before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from mlxstack.core.engine_events import FinishReason, KVSource
from mlxstack.core.preset import SlotSpec
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

SYSTEM = prompt(300, seed=1)
AGENTS = ("ann", "bob", "cy")
N_ANSWER = 4


@pytest.fixture(params=["tiny/3", "tiny-swa/3", *in_soak("tiny/4", "tiny-hybrid/3")])
def driver(request: pytest.FixtureRequest, model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    model, _, n_slots = request.param.partition("/")
    preset = preset_of(model_of(model), slots=SlotSpec(count=int(n_slots), n_ctx=1024))
    with running(preset, tmp_path) as driver:
        yield driver


class KVState(Struct, frozen=True):
    """Contexts, bytes and files of an engine at rest."""

    contexts: tuple[tuple[int, ...], ...]
    names: tuple[str | None, ...]
    live_bytes: int
    parked_bytes: int
    n_entries: int
    files: tuple[str, ...]


def state(driver: Driver, home: Path) -> KVState:
    driver.catch_up()
    loaded = driver.engine.loaded
    kv = loaded.loop.slot_kv
    return KVState(
        contexts=tuple(tuple(context.tokens) for context in kv.slots),
        names=tuple(slot.agent for slot in driver.engine.snapshot().slots),
        live_bytes=kv.live_bytes,
        parked_bytes=kv.prefix_cache.n_bytes,
        n_entries=len(kv.prefix_cache.index.nodes),
        files=tuple(sorted(str(path.relative_to(home)) for path in home.rglob("*.*"))),
    )


def begin(driver: Driver) -> dict[str, tuple[int, ...]]:
    """A first turn of each agent; their next prompts."""
    following = {}
    for number, name in enumerate(AGENTS):
        tokens = SYSTEM + prompt(40, seed=10 + number)
        ask = driver.submit(tokens, N_ANSWER, agent=name, checkpoint_positions=(len(SYSTEM),))
        driver.finish(ask)
        following[name] = tokens + tuple(driver.tokens(ask)) + prompt(5, seed=99)
    return following


def one_shot(driver: Driver, number: int, **more: object) -> str:
    """A helper's request, with the shared prefix for each second one."""
    head = SYSTEM if number % 2 else ()
    tokens = head + prompt(30 + number % 50, seed=1000 + number)
    return driver.submit(tokens, 1 + number % 3, drops_kv=True, **more)


def test_one_shots_leave_all_as_before(
    driver: Driver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also while several run at once, and with KV of others reused."""
    n_shots = 1000 if request.config.getoption("--soak") else 30
    following = begin(driver)
    before = state(driver, tmp_path)
    for number in range(0, n_shots, 5):
        asks = [one_shot(driver, number + i) for i in range(5)]
        for ask in asks:
            driver.finish(ask)
    assert state(driver, tmp_path) == before
    for name, tokens in following.items():
        ask = driver.submit(tokens, N_ANSWER, agent=name)
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.SLOT
        assert len(tokens) - driver.seated(ask).n_cached <= 1 + 5 + 1
        assert driver.tokens(ask) == driver.cold(tokens, N_ANSWER, slot=0)


def test_a_one_shot_reuses_what_is_in_its_slot_and_computes_the_same(
    driver: Driver, tmp_path: Path
) -> None:
    begin(driver)
    before = state(driver, tmp_path)
    for slot in range(3):
        tokens = SYSTEM + prompt(20, seed=7)
        ask = driver.submit(tokens, N_ANSWER, drops_kv=True, slot=slot)
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.FORK
        assert driver.seated(ask).n_cached >= len(SYSTEM)
        cold = driver.submit(tokens, N_ANSWER, drops_kv=True, slot=slot, use_cache=False)
        driver.finish(cold)
        assert driver.seated(cold).n_cached == 0
        assert driver.tokens(ask) == driver.tokens(cold)
    assert state(driver, tmp_path) == before


def test_an_agent_whose_slot_a_one_shot_uses_finds_its_kv(driver: Driver) -> None:
    following = begin(driver)
    n_slots = len(driver.engine.snapshot().slots)
    asks = [driver.submit(prompt(20, seed=50 + i), 200, drops_kv=True) for i in range(n_slots - 1)]
    for ask in asks:
        driver.seated(ask)
    turns = {
        name: driver.submit(tokens, N_ANSWER, agent=name) for name, tokens in following.items()
    }
    for name, ask in turns.items():
        driver.finish(ask)
        assert len(following[name]) - driver.seated(ask).n_cached <= 1 + 5 + 1
    for ask in asks:
        assert driver.finish(ask).reason is FinishReason.LENGTH
    for name, ask in turns.items():
        assert driver.tokens(ask) == driver.cold(following[name], N_ANSWER, slot=0)


def test_a_one_shot_that_is_cancelled_or_refused_leaves_all_as_before(
    driver: Driver, tmp_path: Path
) -> None:
    begin(driver)
    before = state(driver, tmp_path)
    ask = driver.submit(prompt(600, seed=3), 300, drops_kv=True, slot=1)
    driver.seated(ask)
    driver.engine.cancel(ask)
    assert driver.finish(ask).reason is FinishReason.CANCELLED
    assert state(driver, tmp_path) == before
