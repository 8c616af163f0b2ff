"""Transfer of KV files between services: partial reads, verified receipt."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from io import FileIO

from msgspec import Struct

from mlxstack.core.errors import Damaged
from mlxstack.store.files import (
    make_private,
    open_temporary,
    opened,
    refused,
    sync_directory,
    touch,
    write_all,
)
from mlxstack.store.kv_file_format import DIGITS, read_head, read_into
from mlxstack.store.kv_store import DiskKVStore

PART = 1 << 20
"""Bytes that are read or verified at once."""


class KVFileInfo(Struct, frozen=True):
    """Size and checksum of a stored KV file, unchecked."""

    n_bytes: int
    checksum: str


def info(store: DiskKVStore, identity: str, key: str) -> KVFileInfo:
    """Look up a file and mark its use. Raises NotFound, Damaged."""
    path = store.path_of(identity, key)
    with opened(path) as fd:
        n_bytes = os.fstat(fd).st_size
        digits = os.pread(fd, DIGITS.stop - DIGITS.start, DIGITS.start)
    touch(path)
    return KVFileInfo(n_bytes, digits.decode("latin-1"))


def read_part(store: DiskKVStore, identity: str, key: str, start: int) -> bytes:
    """Up to `PART` bytes from `start`, unchecked. Raises NotFound, Damaged."""
    with opened(store.path_of(identity, key)) as fd:
        return os.pread(fd, PART, start)


class IncomingKVFile(AbstractContextManager["IncomingKVFile"]):
    """Incoming KV file in parts; leaving the context discards the rest.

    It is a temporary file until `finish` has verified it. Raises StackError when the disk refuses,
    NotFound for an impossible key, DiskFull beyond a limit of the preset.
    """

    def __init__(self, store: DiskKVStore, identity: str, key: str, n_bytes: int) -> None:
        self._store = store
        self._name = identity, key
        self._path = store.path_of(identity, key)
        self._limit = n_bytes
        self.n_bytes = 0
        store.disk.admit(n_bytes)
        try:
            make_private(self._path.parent, store.disk.barrier)
            self._fd, self._temporary = open_temporary(self._path.parent)
        except OSError as error:
            raise refused(f"the KV file {key} was not received", error) from error

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes | bytearray) -> None:
        """Append a part. Raises Damaged beyond the announced size."""
        if self.n_bytes + len(data) > self._limit:
            raise Damaged(f"the KV file {self._name[1]} is longer than announced")
        try:
            self.n_bytes += write_all(self._fd, memoryview(data), self._store.disk)
        except OSError as error:
            raise refused(f"the KV file {self._name[1]} was not received", error) from error

    def restart(self) -> None:
        """Forget all parts: the sender begins again."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.n_bytes = 0

    def finish(self) -> None:
        """Verify bytes, identity and key; move into place. Raises Damaged."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        with self._store.disk.open(self._fd) as file:
            name = _verified(file)
        if name != self._name:
            raise Damaged(f"the KV file {self._name[1]} holds {name[0]}/{name[1]}")
        try:
            self._store.disk.barrier(self._fd)
            self._temporary.replace(self._path)
            sync_directory(self._path.parent, self._store.disk.barrier)
        except OSError as error:
            raise refused(f"the KV file {self._name[1]} was not received", error) from error


def _verified(file: FileIO) -> tuple[str, str]:
    """Identity and key of a whole, sound file. Raises Damaged."""
    n_bytes = read_head(file).n_bytes
    file.seek(0)
    return read_into(file, _scratch(n_bytes))


def _scratch(n_bytes: int) -> Iterator[memoryview]:
    """Rows for `read_into` in one small buffer, digested in turn."""
    buffer = memoryview(bytearray(min(n_bytes, PART)))
    while n_bytes > 0:
        row = buffer[: min(n_bytes, PART)]
        yield row
        n_bytes -= row.nbytes
