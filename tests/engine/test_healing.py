"""KV files that were lost or spoiled are written again, and found again after a restart."""

from pathlib import Path

import pytest

from mlxstack.core.act import Restored, RestoreSlot, SaveSlot
from mlxstack.core.ports import BlobHead
from mlxstack.core.preset import Preset, SlotSpec
from mlxstack.store.vault import DiskVault
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running

Tokens = tuple[int, ...]


@pytest.fixture
def preset(model_of: ModelOf) -> Preset:
    return preset_of(model_of("tiny"), slots=SlotSpec(count=1, n_ctx=2048))


def turn(driver: Driver, tokens: Tokens, agent: str | None = None) -> tuple[int, Tokens]:
    """How many tokens were reused, and the conversation with its answer."""
    ask = driver.submit(tokens, 4, agent=agent)
    driver.finish(ask)
    n_cached = driver.seated(ask).n_cached
    driver.engine._archive.catch_up()
    return n_cached, tokens + tuple(driver.tokens(ask))


def stored(home: Path) -> list[tuple[BlobHead, Path]]:
    """What lies on disk, the first tokens first."""
    vault = DiskVault(home / "kv")
    paths = {entry.key: Path(entry.path) for entry in vault.entries()}
    (identity,) = {entry.identity for entry in vault.entries()}
    heads = sorted(vault.heads(identity), key=lambda head: (head.start, head.end))
    return [(head, paths[head.key]) for head in heads]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


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
        driver.engine.act(SaveSlot(0, "a.bin")).result(timeout=60)
    with running(preset, tmp_path) as driver:
        restored = driver.engine.act(RestoreSlot(0, "a.bin")).result(timeout=60)
        assert isinstance(restored, Restored)
        assert restored.n_restored == 303
