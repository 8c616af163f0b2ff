"""The vault on a real disk: each key once, checked when read, private."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.errors import Damaged, NotFound, SetupError, StackError
from mlxstack.core.interfaces import KVFile, KVStore
from mlxstack.store.kv_store import DiskKVStore
from tests.store.bad_disks import FullDisk, StutteringDisk, UnreadableDisk, UnsyncableDisk
from tests.store.kv_files import BLOBS, IDENTITY, KEY, small_blob


@pytest.fixture
def vault(tmp_path: Path) -> DiskKVStore:
    return DiskKVStore(tmp_path / "home" / "kv")


def file_in(vault: DiskKVStore, key: str = KEY) -> Path:
    return vault.root / IDENTITY / key[:2] / f"{key}.safetensors"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def as_vault(vault: KVStore) -> KVStore:
    return vault


@given(BLOBS)
def test_d24_a_blob_survives_a_restart(
    tmp_path_factory: pytest.TempPathFactory, blob: KVFile
) -> None:
    root = tmp_path_factory.mktemp("kv")
    n_bytes = as_vault(DiskKVStore(root)).write(blob)
    again = DiskKVStore(root)
    assert again.has(blob.identity, blob.key)
    assert again.read(blob.identity, blob.key) == blob
    assert [entry.n_bytes for entry in again.entries()] == [n_bytes]


def test_g11_a_key_is_written_once_and_its_age_is_its_last_use(vault: DiskKVStore) -> None:
    assert vault.write(small_blob()) > 0
    path = file_in(vault)
    for use in (
        lambda: vault.write(small_blob()),
        lambda: vault.read(IDENTITY, KEY),
        lambda: vault.has(IDENTITY, KEY),
    ):
        os.utime(path, (1000, 1000))
        inode = path.stat().st_ino
        use()
        assert path.stat().st_ino == inode
        assert path.stat().st_mtime > 1000
    assert vault.write(small_blob()) == 0


def test_g12_files_are_0600_and_folders_0700(vault: DiskKVStore) -> None:
    vault.write(small_blob())
    path = file_in(vault)
    assert mode(path) == 0o600
    for folder in (path.parent, path.parent.parent, vault.root, vault.root.parent):
        assert mode(folder) == 0o700


def test_entries(vault: DiskKVStore) -> None:
    keys = {f"{number:02x}ff" for number in range(5)}
    n_bytes = {key: vault.write(small_blob(key)) for key in keys}
    assert {(entry.identity, entry.key) for entry in vault.entries()} == {
        (IDENTITY, key) for key in keys
    }
    assert {entry.key: entry.n_bytes for entry in vault.entries()} == n_bytes


def test_a_missing_key_is_not_found(vault: DiskKVStore) -> None:
    assert not vault.has(IDENTITY, KEY)
    with pytest.raises(NotFound, match=KEY):
        vault.read(IDENTITY, KEY)


@pytest.mark.parametrize("key", ["../../escape", "/etc/passwd", "", "a", "AB", "a\0b", "..", ".x"])
def test_a_key_that_is_no_name_reaches_no_file(vault: DiskKVStore, key: str) -> None:
    assert not vault.has(IDENTITY, key)
    assert not vault.has(key, KEY)
    with pytest.raises(Damaged):
        vault.read(IDENTITY, key)
    with pytest.raises(NotFound):
        vault.path_of(IDENTITY, key)
    with pytest.raises(ValueError):
        vault.write(small_blob(key))


def test_c8_a_damaged_file_is_told_set_aside_and_healed(vault: DiskKVStore) -> None:
    vault.write(small_blob())
    path = file_in(vault)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(Damaged, match=f"{KEY}.*checksum"):
        vault.read(IDENTITY, KEY)
    assert not vault.has(IDENTITY, KEY)
    assert vault.write(small_blob()) > 0
    assert vault.read(IDENTITY, KEY) == small_blob()
    assert path.with_name(f"{KEY}.damaged").exists()
    DiskKVStore(vault.root)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_c8_a_file_that_says_something_else_is_replaced_by_the_next_write(
    vault: DiskKVStore,
) -> None:
    old = replace(small_blob(), meta="after x")
    new = replace(small_blob(), meta="after y")
    vault.write(old)
    assert vault.write(new) > 0
    assert vault.read(IDENTITY, KEY) == new
    assert vault.write(new) == 0
    file_in(vault).write_bytes(b"no KV")
    assert vault.write(new) > 0
    assert vault.read(IDENTITY, KEY) == new


def test_c8_a_damaged_head_is_told_and_set_aside_when_heads_are_listed(
    vault: DiskKVStore, caplog: pytest.LogCaptureFixture
) -> None:
    vault.write(small_blob())
    vault.write(small_blob("cdcd"))
    path = file_in(vault)
    path.write_bytes(path.read_bytes()[:40])
    assert [head.key for head in vault.headers(IDENTITY)] == ["cdcd"]
    assert path.name in caplog.text
    assert not vault.has(IDENTITY, KEY)
    assert path.with_name(f"{KEY}.damaged").exists()


def test_c8_a_file_under_another_name_is_refused(vault: DiskKVStore) -> None:
    vault.write(small_blob())
    file_in(vault).rename(file_in(vault, "abab"))
    with pytest.raises(Damaged, match=f"holds {IDENTITY}/{KEY}"):
        vault.read(IDENTITY, "abab")


def test_c8_exchanged_files_are_set_aside_when_heads_are_listed(vault: DiskKVStore) -> None:
    for key in (KEY, "cdcd"):
        vault.write(small_blob(key))
    first, second = file_in(vault), file_in(vault, "cdcd")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert not list(vault.headers(IDENTITY))
    for key in (KEY, "cdcd"):
        assert not vault.has(IDENTITY, key)
        assert vault.write(small_blob(key)) > 0
        assert vault.head(IDENTITY, key).key == key


def test_links_pipes_and_folders_are_not_read(vault: DiskKVStore, tmp_path: Path) -> None:
    vault.write(small_blob())
    path = file_in(vault)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not vault.has(IDENTITY, KEY)
    with pytest.raises(Damaged, match="symbolic link"):
        vault.read(IDENTITY, KEY)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Damaged, match="regular"):
        vault.read(IDENTITY, KEY)
    path.unlink()
    path.mkdir()
    assert not vault.has(IDENTITY, KEY)
    with pytest.raises(Damaged, match="regular"):
        vault.read(IDENTITY, KEY)


@pytest.mark.parametrize("room", [0, 5, 300, 500])
def test_g12_a_full_disk_leaves_nothing_behind(tmp_path: Path, room: int) -> None:
    vault = DiskKVStore(tmp_path, FullDisk(room))
    with pytest.raises(StackError, match="the disk is full"):
        vault.write(small_blob(payload=bytes(1000)))
    assert not vault.has(IDENTITY, KEY)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_fails_to_sync_has_not_saved(tmp_path: Path) -> None:
    vault = DiskKVStore(tmp_path, UnsyncableDisk())
    with pytest.raises(StackError, match="input/output error"):
        vault.write(small_blob())
    assert not vault.has(IDENTITY, KEY)


def test_a_disk_that_fails_to_read_costs_no_file(tmp_path: Path) -> None:
    DiskKVStore(tmp_path).write(small_blob())
    with pytest.raises(Damaged, match="input/output error"):
        DiskKVStore(tmp_path, UnreadableDisk()).read(IDENTITY, KEY)
    assert list(DiskKVStore(tmp_path, UnreadableDisk()).headers(IDENTITY)) == []
    assert DiskKVStore(tmp_path).read(IDENTITY, KEY) == small_blob()


def test_short_writes_are_continued(tmp_path: Path) -> None:
    vault = DiskKVStore(tmp_path, StutteringDisk())
    vault.write(small_blob())
    assert vault.read(IDENTITY, KEY) == small_blob()


def test_many_threads_write_a_key_once(vault: DiskKVStore) -> None:
    blob = replace(small_blob(), meta="x" * 1000)
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda _: vault.write(blob), range(32)))
    assert sum(n > 0 for n in written) == 1
    assert vault.read(IDENTITY, KEY) == blob


def test_a4_a_root_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file/kv"):
        DiskKVStore(tmp_path / "file" / "kv")


def rows_for(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@given(BLOBS, st.data())
def test_c2_pouring_reads_the_same_bytes_into_any_rows(
    tmp_path_factory: pytest.TempPathFactory, blob: KVFile, data: st.DataObject
) -> None:
    vault = DiskKVStore(tmp_path_factory.mktemp("kv"))
    vault.write(blob)
    payload = b"".join(bytes(plane.data) for plane in blob.tensors)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=4)))
    sizes = [b - a for a, b in pairwise([0, *cuts, len(payload)])]
    rows = rows_for(sizes)
    vault.read_into(blob.identity, blob.key, rows)
    assert b"".join(rows) == payload
    head = vault.head(blob.identity, blob.key)
    assert (head.start, head.end, head.meta) == (blob.start, blob.end, blob.meta)
    assert head.shapes == tuple((plane.dtype, plane.shape) for plane in blob.tensors)


@pytest.mark.parametrize("change", ["flip", "cut", "stretch", "rows"])
def test_c8_pouring_a_damaged_file_is_refused_and_sets_it_aside(
    vault: DiskKVStore, change: str
) -> None:
    vault.write(small_blob())
    path = file_in(vault)
    whole = path.read_bytes()
    changed = {"flip": whole[:-1] + b"!", "cut": whole[:-1], "stretch": whole + b"!"}
    path.write_bytes(changed.get(change, whole))
    with pytest.raises(Damaged, match=path.name):
        vault.read_into(IDENTITY, KEY, rows_for([6 if change == "rows" else 7]))
    assert not vault.has(IDENTITY, KEY)
    with pytest.raises(NotFound):
        vault.read_into(IDENTITY, KEY, rows_for([7]))


def test_c8_every_flipped_bit_is_noticed_while_pouring(vault: DiskKVStore) -> None:
    vault.write(small_blob())
    path = file_in(vault)
    whole = path.read_bytes()
    for at in range(len(whole)):
        vault.write(small_blob())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(Damaged):
            vault.read_into(IDENTITY, KEY, rows_for([7]))
