"""A long context is packed in pieces: others decode in between, and it comes to an end."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.commands import SaveSlot
from mlxstack.core.engine_events import KVSource, TokenSampled
from mlxstack.core.preset import PrefixCacheSpec, SlotSpec
from mlxstack.engine.kv import segments
from mlxstack.engine.slots import slot_kv_manager as slot_preparation
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, preset_of, prompt, running

LONG = prompt(1800, seed=1)
N_PIECES = 4
SLOTS = SlotSpec(count=2, n_ctx=4096)


def test_what_a_long_turn_left_is_packed_while_others_decode(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(model_of("tiny"), slots=SLOTS)
    with running(preset, tmp_path) as driver:
        driver.answer(LONG, 1, slot=1)
        other = driver.submit(prompt(20, seed=2), 1000, slot=0)
        driver.until(other, TokenSampled, 3)
        steps: Counter[int] = Counter()
        pack = segments.pack

        def counted(*args: Any) -> Any:
            steps[driver.engine.loaded.loop.batch.n_calls] += 1
            return pack(*args)

        monkeypatch.setattr(segments, "pack", counted)
        follow_up = LONG + tuple(driver.answer(LONG, 4, slot=1, agent="a")) + prompt(9, seed=3)
        driver.finish(other)
        driver.catch_up()
        assert steps.total() == N_PIECES
        # One at the end of the turn, one at the most before the next step, and so on.
        assert max(steps.values()) <= 2
        cold = driver.cold(follow_up, slot=0)
    with running(preset, tmp_path) as driver:
        ask = driver.submit(follow_up, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.tokens(ask) == cold


def test_c17_a_save_comes_to_its_end_when_memory_has_no_room_for_a_piece(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_preparation, "ROOM_EVERY", 1)
    cache = PrefixCacheSpec(memory_budget_pct=20)
    preset = preset_of(model_of("tiny"), slots=SLOTS, prefix_cache=cache)
    with running(preset, tmp_path, memory_bytes=26_000_000) as driver:
        driver.answer(LONG, 4, slot=1)
        memory = driver.engine.loaded.loop.slot_kv.prefix_cache
        held = driver.context(1)
        assert driver.engine.loaded.loop.slot_kv.live_bytes < memory.budget
        other = driver.submit(prompt(20, seed=2), 200, slot=0)
        driver.until(other, TokenSampled, 3)
        saved: Any = driver.engine.run_slot_command(SaveSlot(1, "a.bin")).result(WAIT_S)
        assert saved.n_saved == len(held)
        driver.finish(other)
