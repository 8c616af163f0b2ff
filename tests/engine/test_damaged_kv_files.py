"""KV files that were lost or spoiled are written again, and found again after a restart."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstack.core.commands import (
    CollectGarbage,
    EraseSlot,
    RestoreSlot,
    SaveSlot,
    SlotRestoreResult,
)
from mlxstack.core.errors import Damaged
from mlxstack.core.interfaces import KVFileHeader
from mlxstack.core.preset import Preset, SlotSpec
from mlxstack.store.kv_store import DiskKVStore
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S

Tokens = tuple[int, ...]


@pytest.fixture
def preset(model_of: ModelOf) -> Preset:
    return preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=2048))


def turn(driver: Driver, tokens: Tokens, agent: str | None = None) -> tuple[int, Tokens]:
    """How many tokens were reused, and the conversation with its answer."""
    ask = driver.submit(tokens, 4, agent=agent)
    driver.finish(ask)
    n_cached = driver.seated(ask).n_cached
    driver.catch_up()
    return n_cached, tokens + tuple(driver.tokens(ask))


def stored(home: Path) -> list[tuple[KVFileHeader, Path]]:
    """What lies on disk, the first tokens first."""
    vault = DiskKVStore(home / "kv")
    paths = {entry.key: Path(entry.path) for entry in vault.entries()}
    (identity,) = {entry.identity for entry in vault.entries()}
    headers = sorted(vault.headers(identity), key=lambda head: (head.start, head.end))
    return [(head, paths[head.key]) for head in headers]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def lose_a_head(preset: Preset, home: Path) -> Tokens:
    """A stored conversation whose first file is damaged; without it the cuts lie elsewhere."""
    with running(preset, home) as driver:
        _, tokens = turn(driver, prompt(300), "ann")
        _, tokens = turn(driver, tokens + prompt(1000, seed=1), "ann")
    flip(stored(home)[0][1], -5)
    return tokens


def test_c8_what_continued_a_damaged_head_is_found_again_once_it_is_computed(
    preset: Preset, tmp_path: Path
) -> None:
    tokens = lose_a_head(preset, tmp_path)
    with running(preset, tmp_path) as driver:
        n_cached, tokens = turn(driver, tokens + prompt(20, seed=2), "ann")
        assert n_cached == 0
    for seed in range(2):
        with running(preset, tmp_path) as driver:
            n_known = len(tokens) - 1
            n_cached, tokens = turn(driver, tokens + prompt(20, seed=3 + seed), "ann")
            assert n_cached == n_known


def test_c8_what_continued_a_damaged_head_is_found_again_once_it_is_saved(
    preset: Preset, tmp_path: Path
) -> None:
    tokens = lose_a_head(preset, tmp_path)
    with running(preset, tmp_path) as driver:
        _, tokens = turn(driver, tokens + prompt(20, seed=2))
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
        driver.engine.run_slot_command(EraseSlot(0)).result(timeout=PATIENCE_S)
    with running(preset, tmp_path) as driver:
        assert turn(driver, tokens + prompt(20, seed=3))[0] == len(tokens) - 1


def test_c14_a_head_that_lives_on_in_a_slot_is_not_swept_before_its_tail(
    preset: Preset, tmp_path: Path
) -> None:
    def grow_older() -> None:
        for _, path in stored(tmp_path):
            then = path.stat().st_mtime_ns - 1200 * 10**9
            os.utime(path, ns=(then, then))

    with running(preset, tmp_path) as driver:
        _, tokens = turn(driver, prompt(300))
        driver.engine.park().result(timeout=PATIENCE_S)
        grow_older()
        _, tokens = turn(driver, tokens + prompt(1300, seed=1))
        driver.engine.park().result(timeout=PATIENCE_S)
    grow_older()
    files = stored(tmp_path)
    n_bytes = sum(path.stat().st_size for _, path in files)
    with running(preset, tmp_path) as driver:
        driver.engine.sweep(CollectGarbage(max_bytes=n_bytes - 1)).result(timeout=PATIENCE_S)
        assert stored(tmp_path) == files[:-1]
        assert turn(driver, tokens + prompt(20, seed=2))[0] >= 1536


def test_a_file_whose_beginning_is_gone_is_named_at_the_start(
    preset: Preset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(preset, tmp_path) as driver:
        _, tokens = turn(driver, prompt(300), "ann")
        turn(driver, tokens + prompt(1000, seed=1), "ann")
    (first, path), (second, _), *_ = stored(tmp_path)
    path.unlink()
    with running(preset, tmp_path):
        assert f"{second.key} is ignored: it continues {first.key}, which is gone" in caplog.text


def test_c8_a_save_writes_what_the_start_found_damaged(
    preset: Preset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(preset, tmp_path) as driver:
        turn(driver, prompt(300))
    ((_, path),) = stored(tmp_path)
    flip(path, 40)
    with running(preset, tmp_path) as driver:
        assert f"{path.name} is damaged" in caplog.text
        turn(driver, prompt(300))
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
    with running(preset, tmp_path) as driver:
        restored = driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(
            timeout=PATIENCE_S
        )
        assert isinstance(restored, SlotRestoreResult)
        assert restored.n_restored == 303


def delete(driver: Driver, home: Path) -> None:
    for folder in (home / "kv").glob("?" * 32):
        shutil.rmtree(folder)


def set_aside(driver: Driver, home: Path) -> None:
    driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=PATIENCE_S)
    flip(stored(home)[0][1], -5)
    with pytest.raises(Damaged):
        driver.engine.run_slot_command(RestoreSlot(0, "a.bin")).result(timeout=PATIENCE_S)


@pytest.mark.parametrize("lose", [delete, set_aside])
def test_c8_kv_that_vanishes_under_a_live_agent_is_written_again(
    preset: Preset, tmp_path: Path, lose: Callable[[Driver, Path], None]
) -> None:
    home = tmp_path / "home"
    copy = tmp_path / "copy"
    with running(preset, home) as driver:
        _, tokens = turn(driver, prompt(600), agent="ann")
        lose(driver, home)
        for seed in range(2):
            n_cached, tokens = turn(driver, tokens + prompt(40, seed=1 + seed), agent="ann")
            assert n_cached >= 600
        shutil.copytree(home, copy)
    # As after a crash: what only the stop would have written is not there.
    with running(preset, copy) as driver:
        assert turn(driver, tokens + prompt(40, seed=9), agent="ann")[0] == len(tokens) - 1
