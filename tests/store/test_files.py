"""Whole files only: kill -9 in the middle, dead writers' leftovers, limits of the system."""

import itertools
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxstack.core.errors import StackError
from mlxstack.core.interfaces import Manifest
from mlxstack.store.files import TEMPORARY, Disk, write_atomic
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.store.bad_disks import FullDisk
from tests.store.kv_files import IDENTITY, manifest, small_blob

N_TOKENS = 50_000
NOBODY = 65534
SAVE_FOREVER = f"""
import sys, itertools
from pathlib import Path
from mlxstack.core.interfaces import KVFile, Manifest, TensorBytes
from mlxstack.store.slot_files import SlotFileFolder
from mlxstack.store.kv_store import DiskKVStore
shelf, vault = SlotFileFolder(Path(sys.argv[1]) / "slots"), DiskKVStore(Path(sys.argv[1]) / "kv")
sizes, start = (100_000, 1_000_000), int(sys.argv[2])
print("ready", flush=True)
for number in itertools.count(start):
    plane = TensorBytes("U8", (sizes[number % 2],), bytes([number % 256]) * sizes[number % 2])
    key = f"{{number:08x}}"
    vault.write(KVFile(key, "segment", "{IDENTITY}", number, number + 1, (plane,)))
    shelf.write("a.bin", Manifest("{IDENTITY}", (number,) * {N_TOKENS}, (key,)))
"""
WRITE_TOO_MUCH = """
import resource, sys
from pathlib import Path
from mlxstack.core.interfaces import Manifest
from mlxstack.store.slot_files import SlotFileFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
SlotFileFolder(Path(sys.argv[1])).write("a.bin", Manifest("id", tuple(range(1000)), ()))
"""


def saves_until_killed(root: Path, start: int, after_s: float) -> None:
    command = [sys.executable, "-c", SAVE_FOREVER, str(root), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_c11_kill_9_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    chance = random.Random(0)
    SlotFileFolder(tmp_path / "slots").write("a.bin", Manifest(IDENTITY, (0,) * N_TOKENS, ()))
    n_interrupted = 0
    newest = 0
    for n in itertools.count():
        # On a busy machine a child may be killed before its first write.
        if n >= 20 and n_interrupted and newest:
            break
        saves_until_killed(tmp_path, newest + 1, chance.uniform(0, 0.05))
        n_interrupted += any(tmp_path.rglob(TEMPORARY + "*"))
        shelf = SlotFileFolder(tmp_path / "slots")
        vault = DiskKVStore(tmp_path / "kv")
        found = shelf.read("a.bin")
        assert found.tokens[0] >= newest
        assert found.tokens == (found.tokens[0],) * N_TOKENS
        for entry in vault.entries():
            vault.read(entry.identity, entry.key)
        assert all(vault.has(IDENTITY, key) for key in found.segments)
        assert not any(tmp_path.rglob(TEMPORARY + "*"))
        newest = found.tokens[0]


def test_g12_a_file_beyond_the_limit_of_the_system_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_TOO_MUCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "a.bin was not saved: the file is bigger than this system allows" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = tmp_path / f"{TEMPORARY}dead"
    dead.write_bytes(b"half")

    class Peeping(Disk):
        def sync(self, fd: int) -> None:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                SlotFileFolder(tmp_path)
                living.extend(tmp_path.glob(TEMPORARY + "*"))
            super().sync(fd)

    living: list[Path] = []
    SlotFileFolder(tmp_path, Peeping()).write("a.bin", manifest())
    assert not dead.exists()
    assert len(living) == 1
    assert SlotFileFolder(tmp_path).read("a.bin") == manifest()


def test_a_vault_clears_leftovers_at_any_depth(tmp_path: Path) -> None:
    DiskKVStore(tmp_path).write(small_blob())
    (entry,) = DiskKVStore(tmp_path).entries()
    left = Path(entry.path).parent / f"{TEMPORARY}x"
    left.touch()
    DiskKVStore(tmp_path)
    assert not left.exists()
    assert Path(entry.path).exists()


def test_an_interrupt_between_two_chunks_leaves_nothing(tmp_path: Path) -> None:
    def chunks():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", chunks(), Disk())
    assert list(tmp_path.iterdir()) == []


@contextmanager
def without_power() -> Iterator[None]:
    """As nobody, where root runs the tests: root may write anywhere."""
    if me := os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_folder_of_somebody_else_is_told(tmp_path: Path) -> None:
    shelf = SlotFileFolder(tmp_path)
    tmp_path.chmod(0o500)
    with without_power(), pytest.raises(StackError, match="permission is denied"):
        shelf.write("a.bin", manifest())
    tmp_path.chmod(0o700)


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.close(fd)
    full = SlotFileFolder(tmp_path, FullDisk(3))
    for _ in range(10):
        with pytest.raises(StackError):
            full.write("a.bin", manifest())
        SlotFileFolder(tmp_path).write("b.bin", manifest())
        SlotFileFolder(tmp_path).read("b.bin")
    again = os.open(tmp_path, os.O_RDONLY)
    os.close(again)
    assert again == fd


def test_on_a_mac_the_cache_of_the_drive_is_emptied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxstack.store import files

    asked: list[int] = []
    monkeypatch.setattr(files, "FULL_SYNC", 51)
    monkeypatch.setattr(files.fcntl, "fcntl", lambda _fd, command: asked.append(command))
    write_atomic(tmp_path / "a", [b"x"], Disk())
    assert asked == [51, 51], "the file, then its folder"


def test_a_network_disk_without_the_full_sync_gets_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxstack.store import files

    monkeypatch.setattr(files, "FULL_SYNC", 0x7FFF_FFF0)
    assert write_atomic(tmp_path / "a", [b"x"], Disk()) == 1
    assert (tmp_path / "a").read_bytes() == b"x"
