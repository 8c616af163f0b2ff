"""When the disk is full, or its share is: refused before writing, nothing lost (C14, G12)."""

import os
import time
from pathlib import Path

import pytest

from mlxstack.core.commands import CollectGarbage, RestoreSlot, SaveSlot, SlotSaveResult
from mlxstack.core.errors import DiskFull
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.policy.kv.prefix_index import StorageTier
from mlxstack.policy.kv.prefix_index_check import check_index
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.models import LLAMA
from tests.patience import PATIENCE_S
from tests.store.bad_disks import FullDisk

MINE = prompt(300, seed=1)
OTHER = prompt(300, seed=2)
BYTES_PER_TOKEN = 2 * LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"] * 32 * 4


def bounded(model: Path, max_bytes: int, n_slots: int = 3) -> Preset:
    cache = PrefixCacheSpec(disk=DiskSpec(max_bytes=max_bytes))
    return preset_of(model, prefix_cache=cache, slots=SlotSpec(count=n_slots, n_ctx=1024))


def files(home: Path) -> set[str]:
    return {path.name for path in (home / "kv").rglob("*.safetensors")}


def save(driver: Driver, slot: int, name: str) -> SlotSaveResult:
    saved = driver.engine.run_slot_command(SaveSlot(slot, name)).result(timeout=PATIENCE_S)
    assert isinstance(saved, SlotSaveResult)
    return saved


def grow_old(home: Path) -> None:
    then = time.time() - 3600
    for path in (*(home / "kv").rglob("*.safetensors"), *(home / "slots").iterdir()):
        os.utime(path, (then, then))


def test_c14_a_save_over_the_limit_is_refused_before_writing(
    model_of: ModelOf, tmp_path: Path
) -> None:
    limit = 200 * BYTES_PER_TOKEN
    with running(bounded(model_of("tiny"), limit), tmp_path) as driver:
        driver.answer(MINE, slot=0)
        before = driver.context(0)
        with pytest.raises(DiskFull, match="max_bytes"):
            save(driver, 0, "a.bin")
        assert not files(tmp_path)
        assert driver.context(0) == before
        follow_up = before + prompt(20, seed=3)
        ask = driver.submit(follow_up, slot=0)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == len(before)
        assert driver.tokens(ask) == driver.cold(follow_up, slot=1)


def test_c14_at_the_limit_the_oldest_makes_room_and_is_forgotten(
    model_of: ModelOf, tmp_path: Path
) -> None:
    limit = 500 * BYTES_PER_TOKEN
    with running(bounded(model_of("tiny"), limit), tmp_path) as driver:
        driver.answer(MINE, slot=0)
        save(driver, 0, "mine.bin")
        grow_old(tmp_path)
        old = files(tmp_path)
        driver.answer(OTHER, slot=1)
        save(driver, 1, "other.bin")
        assert old.isdisjoint(files(tmp_path))
        assert sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*.safetensors")) <= limit
        assert (
            driver.engine.run_slot_command(RestoreSlot(0, "other.bin"))
            .result(PATIENCE_S)
            .n_restored
        )  # type: ignore[union-attr]
        check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)
        assert driver.answer(MINE, slot=1) == driver.cold(MINE, slot=1)


def test_c14_a_sweep_beside_a_running_service_takes_nothing_that_it_needs(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(bounded(model_of("tiny"), 10**9, n_slots=1), tmp_path) as driver:
        driver.answer(MINE)
        save(driver, 0, "mine.bin")
        driver.answer(OTHER)
        driver.catch_up()
        dry = driver.engine.sweep(CollectGarbage(max_bytes=0)).result(PATIENCE_S)
        assert not dry.victims, "what was used a moment ago stays"
        grow_old(tmp_path)
        swept = driver.engine.sweep(CollectGarbage(max_bytes=0)).result(PATIENCE_S)
        assert swept.victims
        assert not files(tmp_path)
        driver.answer(OTHER[:200])
        check_index(driver.engine.loaded.loop.slot_kv.prefix_cache.index)
        assert driver.answer(MINE) == driver.cold(MINE)


def test_c14_what_is_pinned_is_not_swept(model_of: ModelOf, tmp_path: Path) -> None:
    with running(bounded(model_of("tiny"), 10**9, n_slots=1), tmp_path) as driver:
        driver.answer(MINE)
        driver.engine.cache.pin("mine", PromptTokens(MINE)).result(PATIENCE_S)
        driver.answer(OTHER)
        driver.catch_up()
        grow_old(tmp_path)
        assert driver.engine.sweep(CollectGarbage(max_bytes=0)).result(PATIENCE_S).victims == ()
        assert files(tmp_path)
        driver.engine.cache.unpin("mine").result(PATIENCE_S)
        assert driver.engine.sweep(CollectGarbage(max_bytes=0)).result(PATIENCE_S).victims


def test_d9_pinned_kv_that_is_damaged_is_forgotten(model_of: ModelOf, tmp_path: Path) -> None:
    preset = bounded(model_of("tiny"), 10**9, n_slots=1)
    with running(preset, tmp_path) as driver:
        cold = driver.answer(MINE)
    with running(preset, tmp_path) as driver:
        assert (
            driver.engine.cache.pin("mine", PromptTokens(MINE)).result(PATIENCE_S).n_tokens >= 256
        )
        for path in (tmp_path / "kv").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        assert driver.answer(MINE) == cold
        index = driver.engine.loaded.loop.slot_kv.prefix_cache.index
        known = {
            f"{key}.safetensors" for key, n in index.nodes.items() if StorageTier.DISK in n.tiers
        }
        assert known <= files(tmp_path)
        check_index(index)


@pytest.mark.parametrize("kind", ["tiny", "tiny-swa", "tiny-hybrid"])
def test_g12_a_full_disk_refuses_in_words_and_loses_nothing(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    disk = FullDisk(40_000)
    preset = preset_of(model_of(kind), slots=SlotSpec(count=1, n_ctx=1024))
    with running(preset, tmp_path, disk=disk) as driver:
        history = MINE + tuple(driver.answer(MINE, agent="a"))
        with pytest.raises(DiskFull, match="disk is full"):
            save(driver, 0, "a.bin")
        driver.answer(OTHER, agent="b")
        follow_up = history + prompt(20, seed=3)
        ask = driver.submit(follow_up, agent="a")
        driver.finish(ask)
        assert driver.seated(ask).n_cached >= len(MINE) - 128
        assert driver.tokens(ask) == driver.cold(follow_up)
        disk.room = 10**9
        driver.answer(follow_up, agent="a")
        held = driver.context(0)
        save(driver, 0, "a.bin")
        assert driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(
            PATIENCE_S
        ).n_restored == len(held)  # type: ignore[union-attr]


def test_d24_a_disk_that_is_full_at_a_turn_of_an_agent_costs_a_line_in_the_log(
    model_of: ModelOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(bounded(model_of("tiny"), 1000), tmp_path) as driver:
        expected = driver.answer(MINE, agent="a")
        driver.catch_up()
        assert driver.answer(MINE, agent="a") == expected
    assert "max_bytes would be exceeded" in caplog.text
