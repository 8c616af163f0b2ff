"""KV of more than the writer holds on to at once: all of it reaches the disk, in order."""

import time
from functools import partial
from pathlib import Path

import pytest

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource, PrefillProgress
from mlxstack.core.preset import AgentsSpec, Persist, PrefillSpec, PrefixCacheSpec, SlotSpec
from mlxstack.engine.chat_engine import ChatEngine
from mlxstack.engine.kv import write_queue
from mlxstack.policy.kv.prefix_index_check import check_index
from mlxstack.policy.scheduling.scheduler_state import SlotState
from mlxstack.store.background_writer import BackgroundWriter
from mlxstack.store.files import Disk
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, preset_of, prompt, running
from tests.patience import wait_until
from tests.repetition import in_soak

LONG = prompt(1500, seed=1)
NEXT = prompt(20, seed=2)
SLOTS = SlotSpec(count=2, n_ctx=2048)
HELD = 1_200_000


class SlowDisk(Disk):
    """So slow that the engine is always ahead of it."""

    def sync(self, fd: int) -> None:
        time.sleep(0.05)
        super().sync(fd)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer takes one file of KV, and a note."""
    monkeypatch.setattr(write_queue, "BackgroundWriter", partial(BackgroundWriter, 2, HELD))


def noted(home: Path) -> bool:
    """Whether the manifest of an agent appears."""
    wait_until(lambda: list(home.glob("agents/*/*/manifest.json")))
    return bool(list(home.glob("agents/*/*/manifest.json")))


@pytest.mark.parametrize("kind", ["tiny-hybrid", *in_soak("tiny", "tiny-swa")])
def test_g10_a_long_turn_of_an_agent_is_saved_whole(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), slots=SLOTS)
    with running(preset, tmp_path, disk=SlowDisk()) as driver:
        follow_up = LONG + tuple(driver.answer(LONG, agent="a")) + NEXT
        assert noted(tmp_path)
        cold = driver.cold(follow_up)
    with running(preset, tmp_path) as driver:
        ask = driver.submit(follow_up, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.seated(ask).n_cached >= len(LONG)
        assert driver.tokens(ask) == cold
        check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)


@pytest.mark.parametrize("kind", ["tiny-swa", *in_soak("tiny", "tiny-hybrid")])
def test_g12_a_slot_of_more_than_the_writer_holds_is_saved(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), slots=SLOTS)
    with running(preset, tmp_path, disk=SlowDisk()) as driver:
        follow_up = LONG + tuple(driver.answer(LONG, slot=0)) + NEXT
        held = driver.context(0)
        saved = driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(WAIT_S)
        assert saved.n_saved == len(held)  # type: ignore[union-attr]
        assert saved.n_written >= saved.n_bytes  # type: ignore[union-attr]
        driver.engine.run_slot_command(RestoreSlot(1, "a.bin")).result(WAIT_S)
        assert driver.context(1) == held
        assert driver.answer(follow_up, slot=1) == driver.cold(follow_up, slot=0)


@pytest.mark.parametrize("agent", [None, "a"])
def test_g10_what_sits_in_the_slots_is_on_disk_after_a_stop(
    model_of: ModelOf, tmp_path: Path, agent: str | None
) -> None:
    other = prompt(1400, seed=5)
    preset = preset_of(model_of("tiny"), slots=SLOTS, agents=AgentsSpec(persist=Persist.ON_PARK))
    with running(preset, tmp_path, disk=SlowDisk()) as driver:
        driver.answer(LONG, 4, slot=0)
        cold = driver.answer(other, 4, slot=1, agent=agent)
    assert bool(list(tmp_path.glob("agents/*/*/manifest.json"))) == bool(agent)
    with running(preset, tmp_path) as driver:
        for tokens in (LONG, other):
            ask = driver.submit(tokens, 4)
            driver.finish(ask)
            assert driver.seated(ask).n_cached >= len(tokens) - 128
        assert driver.tokens(ask) == cold


def test_d4_what_waits_for_the_disk_gives_way_when_memory_is_short(
    model_of: ModelOf, tmp_path: Path
) -> None:
    cache = PrefixCacheSpec(memory_budget_pct=20)
    preset = preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=2048), prefix_cache=cache)
    with running(preset, tmp_path, memory_bytes=16_000_000, disk=SlowDisk()) as driver:
        memory = driver.engine.loaded.loop.slot_kv.prefix_cache
        for n in range(5):
            tokens = prompt(1300, seed=n)
            answer = driver.answer(tokens, 4, agent=f"{n}")
            assert driver.engine.cache.stats().result(WAIT_S).memory_bytes <= memory.budget + HELD
        assert driver.cold(tokens, 4) == answer
        check_index(memory.index)


def test_g10_what_the_disk_refused_is_written_with_the_next_turn(
    model_of: ModelOf, tmp_path: Path
) -> None:
    from tests.store.bad_disks import FullDisk

    disk = FullDisk(4000)
    preset = preset_of(model_of("tiny"), slots=SLOTS)
    with running(preset, tmp_path, disk=disk) as driver:
        history = LONG + tuple(driver.answer(LONG, 4, agent="a")) + NEXT
        driver.engine.park().result(WAIT_S)
        assert not list(tmp_path.glob("agents/*/*/manifest.json"))
        disk.room = 10**9
        driver.answer(history, 4, agent="a")
        assert noted(tmp_path)


class WatchingDisk(Disk):
    """Notes the state of slot 0 at each write."""

    def __init__(self) -> None:
        self.engine: ChatEngine | None = None
        self.states: list[SlotState] = []

    def write(self, fd: int, data: memoryview) -> int:
        if self.engine is not None:
            self.states.append(self.engine.loaded.loop._state.slot(0).state)
        return super().write(fd, data)


@pytest.mark.parametrize("deferred_s", [WAIT_S, 0.02])
def test_parked_kv_is_written_while_the_engine_is_idle(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferred_s: float
) -> None:
    monkeypatch.setattr(write_queue, "MAX_DEFERRED_S", deferred_s)
    monkeypatch.setattr(write_queue, "BackgroundWriter", BackgroundWriter)
    disk = WatchingDisk()
    preset = preset_of(
        model_of("tiny"), slots=SlotSpec(count=1, n_ctx=2048), prefill=PrefillSpec(chunk_size=16)
    )
    with running(preset, tmp_path, disk=disk) as driver:
        driver.answer(LONG, 4)
        disk.engine = driver.engine
        driver.answer(prompt(1600, seed=7), 40)
        driver.catch_up()
        assert disk.states
        is_busy = bool({SlotState.PREFILLING, SlotState.RUNNING} & set(disk.states))
        assert is_busy is (deferred_s < WAIT_S)


def test_a_slot_is_saved_beside_a_prompt(model_of: ModelOf, tmp_path: Path) -> None:
    preset = preset_of(model_of("tiny"), slots=SLOTS, prefill=PrefillSpec(chunk_size=16))
    with running(preset, tmp_path) as driver:
        driver.answer(LONG, 4, slot=0)
        other = driver.submit(prompt(1600, seed=8), 4, slot=1)
        driver.until(other, PrefillProgress)
        saved = driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(WAIT_S)
        assert saved.n_saved == len(driver.context(0))  # type: ignore[union-attr]
        driver.finish(other)
