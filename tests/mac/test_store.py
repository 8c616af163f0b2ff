"""Slot files on a volume that ignores case, and the flushes of a Mac; its fcntl is imitated."""

import errno
import fcntl
import os
import stat
import unicodedata
from pathlib import Path

import pytest

from mlxstack.core.commands import SaveSlot
from mlxstack.core.errors import Conflict, NotFound
from mlxstack.store import files
from mlxstack.store.files import Disk
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running
from tests.patience import PATIENCE_S
from tests.store.kv_files import manifest, small_blob

FULL = 51
BARRIER = 85


def test_a_name_that_differs_by_case_only_is_refused(tmp_path: Path) -> None:
    shelf = SlotFileFolder(tmp_path)
    shelf.write("Night.bin", manifest("aa01"))
    with pytest.raises(Conflict, match=r"there is Night\.bin already"):
        shelf.write("night.bin", manifest("aa02"))
    assert shelf.read("Night.bin") == manifest("aa01")
    assert [file.name for file in shelf.list()] == ["Night.bin"]
    with pytest.raises(NotFound):
        shelf.read("NIGHT.bin")
    (tmp_path / "Night.bin").unlink()
    shelf.write("night.bin", manifest("aa02"))


def test_a_file_of_the_user_is_not_written_over_in_another_case(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    with pytest.raises(Conflict):
        SlotFileFolder(tmp_path).write("readme", manifest("aa01"))


def test_two_names_that_a_folder_has_already_stay_two(tmp_path: Path) -> None:
    shelf = SlotFileFolder(tmp_path)
    shelf.write("a.bin", manifest("aa01"))
    (tmp_path / "A.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("this volume ignores case")
    shelf.write("A.bin", manifest("aa02"))
    assert shelf.read("a.bin") == manifest("aa01")
    assert shelf.read("A.bin") == manifest("aa02")


@pytest.mark.parametrize("stored", ["NFC", "NFD"])
@pytest.mark.parametrize("asked", ["NFC", "NFD"])
def test_both_normalizations_are_one_name(tmp_path: Path, stored: str, asked: str) -> None:
    shelf = SlotFileFolder(tmp_path)
    first, second = (unicodedata.normalize(form, "été.bin") for form in (stored, asked))
    shelf.write("other.bin", manifest("aa01"))
    (tmp_path / "other.bin").rename(tmp_path / first)
    assert shelf.read(second) == manifest("aa01")
    shelf.write(second, manifest("aa02"))
    assert [file.name for file in shelf.list()] == [first]
    assert shelf.read(first) == manifest("aa02")
    (tmp_path / first).unlink()
    assert shelf.list() == ()
    shelf.write(second, manifest("aa03"))
    assert [file.name for file in shelf.list()] == [unicodedata.normalize("NFC", second)]


class Flushes:
    """An fcntl of macOS that writes down its flushes; `unknown` is what the volume cannot do."""

    def __init__(self, unknown: int | None = None) -> None:
        self.calls: list[tuple[int, str]] = []
        self._unknown = unknown

    def __call__(self, fd: int, command: int) -> int:
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        self.calls.append((command, kind))
        if command == self._unknown:
            raise OSError(errno.ENOTSUP, "not supported")
        return 0


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> Flushes:
    return imitate(monkeypatch, Flushes())


def imitate(monkeypatch: pytest.MonkeyPatch, flushes: Flushes) -> Flushes:
    monkeypatch.setattr(files, "FULL_SYNC", FULL)
    monkeypatch.setattr(files, "BARRIER_SYNC", BARRIER)
    monkeypatch.setattr(fcntl, "fcntl", flushes)
    return flushes


def test_kv_files_cost_barriers_and_a_batch_of_them_one_full_flush(
    tmp_path: Path, flushes: Flushes
) -> None:
    vault = DiskKVStore(tmp_path / "kv")
    shelf = SlotFileFolder(tmp_path / "slots")
    vault.write(small_blob("aa01", b"xx"))
    shelf.write("a.bin", manifest("aa01"))
    flushes.calls.clear()
    names = [f"aa{n:02}" for n in range(2, 12)]
    for name in names:
        vault.write(small_blob(name, b"yy"))
    assert flushes.calls == 10 * [(BARRIER, "file"), (BARRIER, "folder")]
    flushes.calls.clear()
    vault.flush()
    assert flushes.calls == [(FULL, "folder")]
    flushes.calls.clear()
    shelf.write("a.bin", manifest("aa01", *names))
    assert flushes.calls == [(BARRIER, "file"), (FULL, "folder")]


@pytest.mark.mlx
def test_a_saved_slot_costs_two_full_flushes(
    model_of: ModelOf, tmp_path: Path, flushes: Flushes
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        driver.answer(prompt(700), 4, slot=0)
        driver.catch_up()
        flushes.calls.clear()
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(PATIENCE_S)
        # One for its KV, which may lie on another volume, and one for the slot file.
        assert [kind for command, kind in flushes.calls if command == FULL] == 2 * ["folder"]
        assert (BARRIER, "file") in flushes.calls


def test_a_volume_without_barriers_gets_full_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = imitate(monkeypatch, Flushes(unknown=BARRIER))
    SlotFileFolder(tmp_path).write("a.bin", manifest("aa01"))
    assert flushes.calls[-3:] == [(BARRIER, "file"), (FULL, "file"), (FULL, "folder")]
    flushes.calls.clear()
    DiskKVStore(tmp_path / "kv").write(small_blob("aa01", b"xx"))
    assert flushes.calls[-2:] == [(BARRIER, "folder"), (FULL, "folder")]


def test_a_system_without_barriers_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Disk):
        n_syncs = 0

        def sync(self, fd: int) -> None:
            super().sync(fd)
            self.n_syncs += 1

    monkeypatch.setattr(files, "BARRIER_SYNC", None)
    counting = Counting()
    SlotFileFolder(tmp_path, counting).write("a.bin", manifest("aa01"))
    assert counting.n_syncs == 2
