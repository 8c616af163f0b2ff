"""Next turns that are begun early: the same tokens as from cold, and no work before others'."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.commands import SaveSlot
from mlxstack.core.engine_events import EarlyUse, Event, KVSource, RequestFinished, TokenSampled
from mlxstack.core.preset import DiskSpec, KVSpec, PrefillSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.admin import reclaim
from mlxstack.engine.loop import EngineLoop
from mlxstack.features.early_turns.engine import EarlyPrefill
from mlxstack.features.early_turns.policy import REST_STEPS
from mlxstack.policy.kv import eviction
from mlxstack.policy.kv.eviction import MemoryPressure
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.engine.test_reuse_of_every_cache import PRECISIONS
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

KINDS = ["tiny-hybrid", "tiny-later", *in_soak("tiny", "tiny-swa", "tiny-mla", "tiny-8bit")]
N_HEAD = 128
HEAD = prompt(N_HEAD, seed=1)
ASKED = HEAD + prompt(200, seed=2)
STRIPPED = HEAD + prompt(90, seed=3)
NEXT = prompt(20, seed=4)
TWO = SlotSpec(count=2, n_ctx=1024)


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, model_of: ModelOf) -> Preset:
    kv = PRECISIONS.get(request.param)
    return preset_of(model_of("tiny" if kv else request.param), kv=kv or KVSpec(), slots=TWO)


@pytest.fixture(scope="module")
def driver(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    # Fast machines would compute all in one chunk.
    preset = preset_of(model_of("tiny"), slots=TWO, prefill=PrefillSpec(chunk_size=256))
    with running(preset, tmp_path_factory.mktemp("home")) as one:
        yield one


def answered(driver: Driver, name: str, tokens: tuple[int, ...] = ASKED) -> str:
    """An ask of an agent that has been answered in slot 0; the head gets a checkpoint."""
    ask = driver.submit(tokens, 4, slot=0, display_name=name, checkpoint_positions=(N_HEAD,))
    driver.finish(ask)
    return ask


def served(driver: Driver, tokens: tuple[int, ...], **more: Any) -> tuple[Any, list[int]]:
    """The slot and the tokens of a request in slot 0."""
    ask = driver.submit(tokens, 8, **{"slot": 0, **more})
    driver.finish(ask)
    return driver.seated(ask), driver.tokens(ask)


def test_whatever_is_expected_the_answer_is_the_one_from_cold(
    any_kind: Preset, tmp_path: Path
) -> None:
    with running(any_kind, tmp_path) as driver:
        # The guess is right, and there was time for all of it.
        ask = answered(driver, "right")
        driver.expect(STRIPPED, ask, display_name="right")
        driver.catch_up()
        n_begun = driver.n_early[0]
        assert n_begun == len(STRIPPED) - 1 - len(HEAD)
        seated, tokens = served(driver, STRIPPED + NEXT, display_name="right")
        assert tokens == driver.cold(STRIPPED + NEXT, 8, slot=1)
        assert (seated.n_cached, seated.source) == (len(STRIPPED) - 1, KVSource.SLOT)
        assert seated.early == EarlyUse(n_begun, n_begun)
        assert seated.miss is None

        # The request comes when the next turn has just been begun.
        ask = answered(driver, "midway", ASKED[::-1])
        other = ASKED[::-1][:N_HEAD] + prompt(90, seed=5)
        driver.expect(other, ask, display_name="midway")
        seated, tokens = served(driver, other + NEXT, display_name="midway")
        assert tokens == driver.cold(other + NEXT, 8, slot=1)

        # The slot is taken by another agent before the next turn comes.
        ask = answered(driver, "taken", ASKED[2:])
        begun = ASKED[2 : N_HEAD + 2] + prompt(90, seed=14)
        driver.expect(begun, ask, display_name="taken")
        driver.catch_up()
        served(driver, prompt(300, seed=15), display_name="thief")
        seated, tokens = served(driver, begun + NEXT, display_name="taken")
        assert tokens == driver.cold(begun + NEXT, 8, slot=1)
        assert (seated.n_cached, seated.source) == (len(begun) - 1, KVSource.PARKED)
        assert seated.early.n_used == seated.early.n_begun

        # The guess is wrong: the client goes on from the answer as it was.
        ask = answered(driver, "wrong", ASKED[1:])
        history = driver.context(0)
        driver.expect(ASKED[1 : N_HEAD + 1] + prompt(90, seed=6), ask, display_name="wrong")
        driver.catch_up()
        seated, tokens = served(driver, history + NEXT, display_name="wrong")
        assert tokens == driver.cold(history + NEXT, 8, slot=1)
        assert seated.n_cached >= len(history) - 128, "what was left is parked"
        assert seated.early.n_used == 0
        begun, used, wasted = driver.n_early
        assert begun == used + wasted


def test_nothing_is_computed_for_what_is_in_kv(driver: Driver) -> None:
    ask = answered(driver, "nothing")
    before = driver.n_early
    history = driver.context(0)
    driver.expect(history + NEXT, ask, display_name="nothing")
    driver.catch_up()
    assert driver.n_early == before
    assert driver.context(0) == history


def stepped(driver: Driver, scene: Callable[[EngineLoop, list[Event]], Any]) -> Any:
    """Run a scene on the engine's thread, which then makes no steps of its own."""
    events: list[Event] = []
    return driver.engine.run(lambda loop: scene(loop, events)).result(timeout=PATIENCE_S)


@pytest.mark.parametrize("slot", [0, 1], ids=["in its slot", "in another slot"])
def test_a_newcomer_waits_for_no_second_chunk(driver: Driver, slot: int) -> None:
    ask = answered(driver, f"quiet {slot}")
    expected = HEAD + prompt(700, seed=8 + slot)
    early: EarlyPrefill = driver.engine.loaded.features[EarlyPrefill]
    newcomer = Request("new", PromptTokens(prompt(300, seed=7)), 4, slot=slot)

    def scene(loop: EngineLoop, events: list[Event]) -> tuple[int, list[int]]:
        request = Request("e", PromptTokens(expected), 0, slot=0, display_name="quiet")
        early.begin(request, ask)
        loop.step(events.extend)
        loop.step(events.extend)
        n_begun = loop.stats.counters.n_early_tokens
        loop.submit(newcomer)
        seen = []
        while not any(isinstance(event, RequestFinished) for event in events):
            loop.step(events.extend)
            seen.append(loop.stats.counters.n_early_tokens)
        return n_begun, seen

    before = driver.n_early[0]
    n_begun, seen = stepped(driver, scene)
    assert n_begun > before
    assert set(seen) == {n_begun}
    driver.catch_up()
    is_over = slot == 0
    assert (driver.n_early[0] == n_begun) == is_over, "in its slot it does not go on"


def test_rows_decode_on_between_two_chunks(driver: Driver) -> None:
    """Chunks come after long rests, and the tokens are those of a row alone."""
    ask = answered(driver, "beside")
    n_answer = 2 * REST_STEPS + 10
    alone = driver.cold(prompt(30, seed=9), n_answer, slot=1)
    expected = HEAD + prompt(800, seed=10)
    early: EarlyPrefill = driver.engine.loaded.features[EarlyPrefill]

    def scene(loop: EngineLoop, events: list[Event]) -> tuple[list[int], list[int]]:
        loop.submit(
            Request("row", PromptTokens(prompt(30, seed=9)), n_answer, slot=1, use_cache=False)
        )
        loop.step(events.extend)
        request = Request("e", PromptTokens(expected), 0, slot=0, display_name="beside")
        early.begin(request, ask)
        counts = [loop.stats.counters.n_early_tokens]
        while not any(isinstance(event, RequestFinished) for event in events):
            loop.step(events.extend)
            counts.append(loop.stats.counters.n_early_tokens)
        return counts, [event.token for event in events if isinstance(event, TokenSampled)]

    counts, tokens = stepped(driver, scene)
    n_chunks = sum(a < b for a, b in pairwise(counts))
    assert 1 <= n_chunks <= len(counts) / REST_STEPS
    assert tokens == alone
    driver.catch_up()


def test_a_slot_that_was_used_since_is_left_alone(driver: Driver) -> None:
    ask = answered(driver, "late")
    _, _ = served(driver, NEXT, display_name="other")
    before = driver.n_early
    held = driver.context(0)
    driver.expect(STRIPPED, ask, display_name="late")
    driver.catch_up()
    assert (driver.n_early, driver.context(0)) == (before, held)


def test_it_is_no_request_and_its_slot_stays_idle(driver: Driver) -> None:
    ask = answered(driver, "idle", ASKED[::-1])
    before = driver.engine.snapshot().counters
    expected = ASKED[::-1][:N_HEAD] + prompt(100, seed=11)
    driver.expect(expected, ask, display_name="idle")
    driver.catch_up()
    now = driver.engine.snapshot()
    for name in ("n_requests", "n_completed", "n_prompt_tokens", "n_cached_tokens", "prompt_s"):
        assert getattr(now.counters, name) == getattr(before, name), name
    slot = now.slots[0]
    assert (slot.n_early, slot.n_early_left) == (99, 0)
    assert slot.request == ask
    assert slot.n_tokens == len(expected) - 1
    assert not now.waiting


def test_a_slot_can_be_saved_in_the_midst_of_it(driver: Driver) -> None:
    ask = answered(driver, "saved", ASKED[2:])
    driver.expect(ASKED[2:150] + prompt(600, seed=12), ask, display_name="saved")
    saved = driver.engine.run_slot_command(SaveSlot(0, "early.bin")).result(timeout=PATIENCE_S)
    driver.catch_up()
    assert saved.n_saved == len(driver.context(0)), "nothing was computed after it"  # type: ignore[union-attr]


def test_it_ends_under_memory_pressure(driver: Driver) -> None:
    ask = answered(driver, "pressed", ASKED[3:])
    early: EarlyPrefill = driver.engine.loaded.features[EarlyPrefill]

    def scene(loop: EngineLoop, events: list[Event]) -> list[bool]:
        request = Request("e", PromptTokens(ASKED[3:100] + NEXT), 0, slot=0, display_name="pressed")
        seen = []
        for pressure in MemoryPressure:
            early.begin(request, ask)
            reclaim(loop, pressure)
            seen.append(early.is_pending)
        return seen

    assert stepped(driver, scene) == [True, False, False]


def test_a_memory_that_is_full_keeps_its_bound(model_of: ModelOf, tmp_path: Path) -> None:
    """The path that is left goes first, and no budget is exceeded by a guess."""
    spec = PrefixCacheSpec(memory_budget_pct=1, disk=DiskSpec(enabled=False))
    preset = preset_of(model_of("tiny"), slots=TWO, prefix_cache=spec)
    with running(preset, tmp_path, memory_bytes=200_000_000) as driver:
        memory = driver.engine.loaded.loop.slot_kv.prefix_cache
        for n in range(4):
            ask = answered(driver, f"agent {n}", prompt(500, seed=20 + n))
            expected = prompt(500, seed=20 + n)[:N_HEAD] + prompt(290, seed=30 + n)
            driver.expect(expected, ask, display_name=f"agent {n}")
            driver.catch_up()
            held = driver.engine.run(lambda loop: loop.slot_kv.live_bytes).result(
                timeout=PATIENCE_S
            )
            assert held + memory.index.memory_bytes <= memory.budget
        seated, tokens = served(driver, expected + NEXT, display_name="agent 3")
        assert seated.early.n_used == seated.early.n_begun > 0
        assert tokens == driver.cold(expected + NEXT, 8, slot=1)


def test_the_path_that_was_left_is_the_first_to_go(driver: Driver) -> None:
    """An older conversation that nobody left stays before it."""
    answered(driver, "older", prompt(400, seed=16))
    ask = answered(driver, "leaver", prompt(400, seed=17))
    expected = prompt(400, seed=17)[:N_HEAD] + prompt(200, seed=18)
    driver.expect(expected, ask, display_name="leaver")
    driver.catch_up()

    def first_to_go(loop: EngineLoop, events: list[Event]) -> tuple[int, list[bool]]:
        index = loop.slot_kv.prefix_cache.index
        records = eviction.entries(index)
        first = eviction.plan(records, eviction.EvictionGoal(1))
        return len(records), [index.nodes[key].was_left for key in first]

    n_records, first = stepped(driver, first_to_go)
    assert n_records > 1
    assert first == [True]


def test_an_early_turn_without_room_fails_nobody(driver: Driver) -> None:
    ask = answered(driver, "roomless", ASKED[4:])
    slot_kv = driver.engine.loaded.loop.slot_kv
    before = slot_kv.array_limit
    slot_kv.array_limit = 1
    try:
        driver.expect(ASKED[4:100] + prompt(400, seed=13), ask, display_name="roomless")
        driver.catch_up()
    finally:
        slot_kv.array_limit = before
    tokens = ASKED[4:100] + NEXT
    assert served(driver, tokens)[1] == driver.cold(tokens, 8, slot=1)


def test_agents_that_never_match_are_left_alone(driver: Driver) -> None:
    for turn in range(3):
        ask = answered(driver, "stubborn", prompt(400, seed=40 + turn))
        before = driver.n_early[0]
        driver.expect(prompt(300, seed=50 + turn), ask, display_name="stubborn")
        driver.catch_up()
        n_begun = driver.n_early[0] - before
        assert (n_begun > 0) == (turn < 2)


def test_a_new_agent_of_a_client_that_never_matches_is_left_alone(driver: Driver) -> None:
    begun = []
    for turn in range(6):
        name = f"new {turn}"
        client = "stubborn" if turn < 4 else "other"
        tokens = prompt(400, seed=60 + turn)
        ask = answered(driver, name, tokens)
        before = driver.n_early[0]
        driver.expect(prompt(300, seed=70 + turn), ask, display_name=name, client=client)
        driver.catch_up()
        begun.append(driver.n_early[0] > before)
        follows = prompt(300, seed=70 + turn) if client == "other" else tokens
        served(driver, follows + NEXT, display_name=name, client=client)
    assert begun == [True, True, False, False, True, True]
