"""How asks, errands and the engine end: nothing that was computed or saved is lost with them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.core.commands import CollectGarbage, EvictAgentFromSlot, RestoreSlot, SaveSlot
from mlxstack.core.engine_events import FinishReason, PrefillProgress, TokenSampled
from mlxstack.core.errors import Broken, StackError
from mlxstack.core.preset import AgentsSpec, Persist, PrefillSpec, SlotSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.kv import segments
from mlxstack.store.slot_files import SlotFileFolder
from tests.conftest import ModelOf
from tests.engine.gated_disk import Gate
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running
from tests.patience import wait_until

FIRST = prompt(300, seed=1)
SLOTS = SlotSpec(count=2, n_ctx=8192)


@pytest.fixture
def driver(model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    with running(preset_of(model_of("tiny"), slots=SLOTS), tmp_path) as driver:
        yield driver


def save(driver: Driver, slot: int = 0) -> int:
    return driver.engine.run_slot_command(SaveSlot(slot, "a.bin")).result(WAIT_S).n_saved  # type: ignore[union-attr]


@pytest.mark.parametrize("agent", [None, "a"])
def test_g10_a_drain_that_runs_out_loses_no_context(
    model_of: ModelOf, tmp_path: Path, agent: str | None
) -> None:
    preset = preset_of(model_of("tiny"), slots=SLOTS, agents=AgentsSpec(persist=Persist.ON_PARK))
    with running(preset, tmp_path) as driver:
        driver.answer(FIRST, 4, slot=0, agent=agent)
        busy = driver.submit(prompt(200, seed=2), 8000, slot=1)
        driver.until(busy, TokenSampled)
    assert bool(list(tmp_path.glob("agents/*/*/manifest.json"))) == bool(agent)
    with running(preset, tmp_path) as driver:
        for tokens in (FIRST, prompt(200, seed=2)):
            ask = driver.submit(tokens, 4)
            driver.finish(ask)
            assert driver.seated(ask).n_cached >= 128


def test_c11_a_save_that_waits_at_the_end_of_a_drain_saves_what_is_there(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny"), slots=SLOTS), tmp_path) as driver:
        driver.answer(FIRST, 4, slot=0)
        before = save(driver)
        busy = driver.submit(FIRST + prompt(9, seed=2), 8000, slot=0)
        driver.until(busy, TokenSampled)
        saving = driver.engine.run_slot_command(SaveSlot(0, "a.bin"))
    assert saving.result(0).n_saved > before  # type: ignore[union-attr]
    assert len(SlotFileFolder(tmp_path / "slots").read("a.bin").tokens) > before


def test_c11_a_save_that_waits_for_a_request_that_breaks_keeps_the_old_file(driver: Driver) -> None:
    driver.answer(FIRST, 4, slot=0)
    before = save(driver)
    bad = driver.submit(FIRST, 5, slot=0, sampling=SamplingParams(temperature=1, min_p=7.0))
    saving = driver.engine.run_slot_command(SaveSlot(0, "a.bin"))
    with pytest.raises(Broken, match="min_p"):
        driver.finish(bad)
    with pytest.raises(StackError, match="min_p"):
        saving.result(WAIT_S)
    restored = driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(WAIT_S)
    assert restored.n_restored == before  # type: ignore[union-attr]


def test_c11_a_save_in_pieces_is_finished_before_a_stop(driver: Driver) -> None:
    driver.answer(prompt(4000, seed=1), 4, slot=0)
    saving = driver.engine.run_slot_command(SaveSlot(0, "a.bin"))
    driver.engine.stop(WAIT_S)
    assert saving.result(WAIT_S).n_saved == 4003  # type: ignore[union-attr]


def test_a_broken_turn_leaves_idle_contexts_alone(driver: Driver) -> None:
    driver.answer(FIRST, 4, slot=0)
    held = driver.context(0)
    busy = driver.submit(prompt(50, seed=3), 8000, slot=1)
    driver.until(busy, TokenSampled)
    driver.engine.post(lambda: 1 // 0)
    with pytest.raises(Broken, match="division"):
        driver.finish(busy)
    assert driver.context(0) == held
    assert driver.answer(FIRST, 4, slot=0) == driver.cold(FIRST, 4, slot=1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_answer_ends_though_its_kv_cannot_be_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room for a copy")

    cold = driver.cold(FIRST, 4)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "pack", full)
        ask = driver.submit(FIRST, 8000 if is_cancelled else 4, agent="a")
        driver.until(ask, TokenSampled, 4)
        if is_cancelled:
            driver.engine.cancel(ask)
            assert driver.finish(ask).reason is FinishReason.CANCELLED
        assert driver.finish(ask) and driver.tokens(ask)[:4] == cold
    assert driver.answer(FIRST, 4, agent="a") == cold


def test_a_sweep_that_nobody_waits_for_breaks_nothing(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    driver.engine.post(gate.wait)  # type: ignore[arg-type]
    sweep = driver.engine.sweep(CollectGarbage(max_bytes=0))
    assert sweep.cancel()
    gate.set()
    driver.answer(FIRST, 4)
    driver.catch_up()
    assert not caplog.text


@pytest.mark.parametrize("names", [{"agent": "a"}, {"display_name": "a"}])
def test_an_agent_leaves_its_slot_by_whatever_name_it_has(
    driver: Driver, names: dict[str, str]
) -> None:
    driver.answer(FIRST, 4, slot=0, **names)
    driver.answer(FIRST, 4, slot=1, agent="b")
    n_tokens = len(driver.context(0))
    gone = [
        driver.engine.run_slot_command(EvictAgentFromSlot(slot, "a", is_kept=False))
        for slot in (0, 1)
    ]
    assert [one.result(WAIT_S).n_erased for one in gone] == [n_tokens, 0]  # type: ignore[union-attr]
    assert driver.context(0) == ()
    assert len(driver.context(1)) == n_tokens
    assert driver.engine.snapshot().slots[1].agent == "b"


def test_e11_who_leaves_while_its_kv_is_read_leaves_the_slot_to_who_was_there(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=1024))
    gate = Gate()
    with running(preset, tmp_path) as driver:
        driver.answer(FIRST, 4, agent="late")
    with running(preset, tmp_path, disk=gate) as driver:
        driver.answer(prompt(300, seed=2), 4, agent="here")
        n_tokens = len(driver.context(0))
        gate.is_open.clear()
        ask = driver.submit(FIRST, 4, agent="late")
        wait_until(lambda: driver.engine.snapshot().slots[0].agent != "here")
        assert driver.engine.snapshot().slots[0].is_reading
        driver.engine.cancel(ask)
        assert driver.finish(ask).reason is FinishReason.CANCELLED
        assert not driver.engine.snapshot().slots[0].is_reading
        gate.is_open.set()
        assert driver.engine.cache.stats().result(WAIT_S).whole.n_requests == 1
        assert driver.engine.snapshot().slots[0].agent == "here"
        gone = [
            driver.engine.run_slot_command(EvictAgentFromSlot(0, who, is_kept=False))
            for who in ("late", "here")
        ]
        assert [one.result(WAIT_S).n_erased for one in gone] == [0, n_tokens]  # type: ignore[union-attr]


def test_what_was_compared_for_an_ask_is_forgotten_with_it(
    model_of: ModelOf, tmp_path: Path
) -> None:
    preset = preset_of(model_of("tiny"), slots=SLOTS, prefill=PrefillSpec(chunk_size=128))
    with running(preset, tmp_path) as driver:
        first = driver.submit(prompt(4000), 4)
        driver.until(first, PrefillProgress)
        second = driver.submit((*prompt(4000), 1), 4)
        driver.until(first, PrefillProgress, 4)
        driver.engine.cancel(second)
        driver.finish(second)
        driver.finish(first)
        matches = driver.engine.loaded.loop._matches
        assert not matches._promises
        assert not [key for key in matches._known if key[0] == second]
