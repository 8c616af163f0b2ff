"""Content-addressed KV files: `<root>/<identity>/<ab>/<key>.safetensors`, each written once."""

import logging
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from msgspec import Struct

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.errors import Conflict, Damaged, DiskFull, NotFound, UnknownVersion
from mlxstack.core.interfaces import KVFile, KVFileHeader
from mlxstack.store.backup_exclusion import exclude_from_backups
from mlxstack.store.files import (
    MORE_SPACE,
    TEMPORARY,
    Disk,
    clear_leftovers,
    naming,
    open_private,
    opened,
    read_whole,
    refused,
    sync_directory,
    touch,
    write_atomic,
)
from mlxstack.store.kv_file_format import decode, encode, head_of, read_head, read_into

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
ASIDE = ".damaged"
NOTE = "note"
# Lower case only: on a Mac "A" and "a" are the same file.
KEY = re.compile(r"[0-9a-z][0-9a-z._-]{1,127}")


class KVFileEntry(Struct, frozen=True):
    """KV file; `used_at`: Unix seconds of last write, read or `has`."""

    identity: str
    key: str
    path: str
    n_bytes: int
    used_at: float


class DiskKVStore:
    """A `core.interfaces.KVStore` on disk. Raises SetupError when `root` cannot be created.

    Any number of threads and processes may share one root.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.disk = disk or Disk()
        self._writing = Lock()
        open_private(root, self.disk)
        # Gigabytes that can be computed again, with the text of conversations in them.
        exclude_from_backups(root, sys.platform)
        clear_leftovers(root.rglob(TEMPORARY + "*"))
        for old in root.rglob("*" + ASIDE):
            old.unlink(missing_ok=True)

    def has(self, identity: str, key: str) -> bool:
        """Check existence and update the mtime, which protects it from GC.

        Garbage collection then spares it until the manifest that names it is written.
        """
        return _is_key(identity) and _is_key(key) and touch(self._path(identity, key))

    def write(self, file: KVFile) -> int:
        """Store at most once per key; bytes written, 0 if present.

        It is on the medium after `flush`, and before anything written to its volume later.

        A file of this key with another header is replaced: its parent may be gone, or its header is
        damaged. The KV of a key is the same in both.
        Raises StackError when the disk refuses, ValueError on an impossible tensor or key.
        """
        path = self.path_of(file.identity, file.key, ValueError)
        if self._has_same(file):
            return 0
        with self._writing:
            if self._has_same(file):
                return 0
            return write_atomic(path, encode(file), self.disk, is_durable=False)

    def flush(self) -> None:
        """Bring all files to the medium. Raises StackError when the disk refuses."""
        try:
            sync_directory(self.root, self.disk.complete_barriers)
        except OSError as error:
            raise refused("KV files were not flushed", error) from error

    def read(self, identity: str, key: str) -> KVFile:
        """Read and verify a file as views. Raises NotFound or Damaged.

        A damaged file is set aside until the next start, so that the next write of its key replaces
        it; unreadable files stay, and so do files of another format version (UnknownVersion).
        """
        path = self.path_of(identity, key, Damaged)
        data = read_whole(path, self.disk)
        with _aside_if_damaged(path):
            file = decode(data)
            _check_name((file.identity, file.key), (identity, key))
        touch(path)
        return file

    def make_room(self, n_bytes: int, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """No-op: this store has no bound but the disk. Raises DiskFull."""
        try:
            n_free = shutil.disk_usage(self.root).free
        except OSError:
            return GCResult()
        if n_bytes > n_free:
            raise DiskFull(
                f"not saved: {n_bytes} bytes are to be written and the disk has {n_free} left; "
                + MORE_SPACE
            )
        return GCResult()

    def sweep(self, command: CollectGarbage, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """Raises Conflict: the contexts that name KV files are not known here."""
        raise Conflict("garbage collection is disabled for this store")

    def note(self, identity: str, data: bytes) -> None:
        """Replace the note beside the KV files of this identity. Raises StackError."""
        if not _is_key(identity):
            raise ValueError(f"no folder can be called {identity!r}")
        write_atomic(self.root / identity / NOTE, [data], self.disk)

    def noted(self, identity: str) -> bytes | None:
        """The note; None when there is none that can be read."""
        if not _is_key(identity):
            return None
        with suppress(NotFound, Damaged):
            return read_whole(self.root / identity / NOTE, self.disk)
        return None

    def head(self, identity: str, key: str) -> KVFileHeader:
        """Header of a file, of which only the name is checked.

        Raises NotFound or Damaged.
        """
        path = self.path_of(identity, key, Damaged)
        with opened(path) as fd, self.disk.open(fd) as file, _aside_if_damaged(path):
            head = read_head(file)
            _check_name((head.identity, head.key), (identity, key))
        return head

    def read_into(self, identity: str, key: str, rows: Iterable[memoryview]) -> None:
        """Read planes into `rows`, verified as by `read`. Raises NotFound, Damaged."""
        path = self._path(identity, key)
        with opened(path) as fd, self.disk.open(fd) as file, _aside_if_damaged(path):
            _check_name(read_into(file, rows), (identity, key))
        touch(path)

    def headers(self, identity: str) -> Iterator[KVFileHeader]:
        """Unchecked headers of one identity's files, without invalid ones.

        They are logged; damaged files are set aside as `head` does.
        """
        if not _is_key(identity):
            return
        for path in (self.root / identity).glob(f"*/*{SUFFIX}"):
            try:
                yield self.head(identity, path.name.removesuffix(SUFFIX))
            except NotFound:
                continue
            except Damaged as error:
                log.warning("%s", error)

    def entries(self) -> Iterator[KVFileEntry]:
        """All files, unordered; those that vanish during the scan are left out."""
        for path in self.root.glob(f"*/*/*{SUFFIX}"):
            with suppress(FileNotFoundError):
                about = path.stat(follow_symlinks=False)
                key = path.name.removesuffix(SUFFIX)
                identity = path.parent.parent.name
                yield KVFileEntry(identity, key, str(path), about.st_size, about.st_mtime)

    def path_of(self, identity: str, key: str, error: type[Exception] = NotFound) -> Path:
        """Path for this key. Raises `error` for an impossible key."""
        if not _is_key(identity) or not _is_key(key):
            raise error(f"no KV file can be called {identity!r}/{key!r}")
        return self._path(identity, key)

    def _has_same(self, file: KVFile) -> bool:
        """Whether its file exists with the same header."""
        with suppress(NotFound, Damaged):
            is_there = self.has(file.identity, file.key)
            return is_there and self.head(file.identity, file.key) == head_of(file)
        return False

    def _path(self, identity: str, key: str) -> Path:
        return self.root / identity / key[:2] / (key + SUFFIX)


@contextmanager
def _aside_if_damaged(path: Path) -> Iterator[None]:
    try:
        with naming(f"KV file {path.name}"):
            yield
    except UnknownVersion:
        raise
    except Damaged:
        with suppress(OSError):
            path.replace(path.with_name(path.name.removesuffix(SUFFIX) + ASIDE))
        raise


def _check_name(actual: tuple[str, str], expected: tuple[str, str]) -> None:
    if actual != expected:
        raise Damaged(f"it holds {actual[0]}/{actual[1]}")


def _is_key(text: str) -> bool:
    return KEY.fullmatch(text) is not None
