"""KV files from another service: in parts, verified before they are in the store."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.errors import Damaged, NotFound, StackError
from mlxstack.core.interfaces import KVFile
from mlxstack.features.remote_kv import store as kv_transfer
from mlxstack.features.remote_kv.store import IncomingKVFile
from mlxstack.store.kv_store import DiskKVStore
from tests.store.bad_disks import FullDisk
from tests.store.kv_files import BLOBS, IDENTITY, KEY, small_blob


def bytes_of(root: Path, blob: KVFile) -> bytes:
    """The file of a blob, as another service would send it."""
    store = DiskKVStore(root)
    store.write(blob)
    return store.path_of(blob.identity, blob.key).read_bytes()


def send(store: DiskKVStore, name: tuple[str, str], data: bytes, n_bytes: int = 1 << 30) -> None:
    with IncomingKVFile(store, *name, n_bytes) as incoming:
        incoming.write(data[: len(data) // 3])
        incoming.write(data[len(data) // 3 :])
        incoming.finish()


def files_in(store: DiskKVStore) -> list[str]:
    return [path.name for path in store.root.rglob("*") if path.is_file()]


@given(BLOBS)
def test_a_sent_file_is_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, blob: KVFile
) -> None:
    root = tmp_path_factory.mktemp("kv")
    here = DiskKVStore(root / "here")
    there = DiskKVStore(root / "there")
    there.write(blob)
    about = kv_transfer.info(there, blob.identity, blob.key)
    data = kv_transfer.read_part(there, blob.identity, blob.key, 0)
    assert len(data) == about.n_bytes
    send(here, (blob.identity, blob.key), data)
    assert here.read(blob.identity, blob.key) == blob
    assert kv_transfer.info(here, blob.identity, blob.key) == about


@given(st.data())
def test_an_altered_or_cut_file_is_never_in_the_store(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("kv")
    whole = bytes_of(root / "there", small_blob())
    at = data.draw(st.integers(0, len(whole) - 1))
    sent = data.draw(
        st.sampled_from(
            [whole[:at], whole + b"x", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]]
        )
    )
    here = DiskKVStore(root / "here")
    with pytest.raises(Damaged):
        send(here, (IDENTITY, KEY), sent)
    assert files_in(here) == []


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    data = bytes_of(tmp_path / "there", small_blob())
    here = DiskKVStore(tmp_path / "here")
    for name in ((IDENTITY, "cd" * 16), ("ef" * 16, KEY)):
        with pytest.raises(Damaged, match="holds"):
            send(here, name, data)
    for name in (("..", KEY), (IDENTITY, "../../x"), (IDENTITY, "a/b")):
        with pytest.raises(NotFound):
            send(here, name, data)
        with pytest.raises(NotFound):
            kv_transfer.info(here, *name)
    assert files_in(here) == []


def test_more_bytes_than_announced_are_not_written(tmp_path: Path) -> None:
    data = bytes_of(tmp_path / "there", small_blob())
    here = DiskKVStore(tmp_path / "here")
    with pytest.raises(Damaged, match="longer than announced"):
        send(here, (IDENTITY, KEY), data, len(data) - 1)
    assert files_in(here) == []


def test_a_transfer_begins_again(tmp_path: Path) -> None:
    data = bytes_of(tmp_path / "there", small_blob())
    here = DiskKVStore(tmp_path / "here")
    with IncomingKVFile(here, IDENTITY, KEY, len(data)) as incoming:
        incoming.write(b"another file" * 3)
        incoming.restart()
        incoming.write(data)
        assert incoming.n_bytes == len(data)
        incoming.finish()
    assert here.read(IDENTITY, KEY) == small_blob()


def test_a_full_disk_refuses_a_file_in_words(tmp_path: Path) -> None:
    data = bytes_of(tmp_path / "there", small_blob())
    here = DiskKVStore(tmp_path / "here", FullDisk(10))
    with pytest.raises(StackError, match="not received"):
        send(here, (IDENTITY, KEY), data)
    assert files_in(here) == []
