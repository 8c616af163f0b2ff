"""Files of the store: written atomically and durably, read, parsed and removed.

Only their owner has access (0600, folders 0700). Errors of the system, and of damaged contents,
become messages for users.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from mlxstack.core.errors import (
    Damaged,
    DiskFull,
    NotFound,
    SetupError,
    StackError,
    UnknownVersion,
    Unreadable,
)

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY)

# On a Mac fsync leaves the bytes in the cache of the drive; this brings them to the medium.
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

# F_BARRIERFSYNC of sys/fcntl.h, which Python's fcntl does not name: it orders instead of waiting.
BARRIER_SYNC: int | None = 85 if sys.platform == "darwin" else None

MORE_SPACE = "free some space or run `mlx-stack cache gc --older-than 30d`"
WHY = {
    errno.ENOSPC: f"the disk is full; {MORE_SPACE}",
    errno.EDQUOT: f"your disk quota is used up; {MORE_SPACE}",
    errno.EFBIG: "the file is bigger than this system allows; raise `ulimit -f`",
    errno.EROFS: "the disk is mounted read-only; choose another folder",
    errno.EACCES: "permission is denied; check who owns the folder",
    errno.EPERM: "permission is denied; check who owns the folder",
    errno.EIO: "the disk reports an input/output error; check its health",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine; close some programs",
    errno.ELOOP: "it is a symbolic link, and links are not followed here",
}


class Disk:
    """Disk operations; tests inject one that is full or broken."""

    def admit(self, n_bytes: int) -> None:
        """Admit a file before its write. Raises StackError."""

    def check_limit(self, n_bytes: int) -> None:
        """Raises DiskFull when so many bytes would not be admitted now."""

    def write(self, fd: int, data: memoryview) -> int:
        """Write a part of `data`; its length, at least 1. Raises OSError."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Return when what was written is on the medium."""
        if FULL_SYNC is None or not _flush(fd, FULL_SYNC):
            os.fsync(fd)

    def barrier(self, fd: int) -> None:
        """Order earlier writes before all later ones; at worst a `sync`.

        Far cheaper on a Mac. It is on the medium after the next `sync` on the same volume.
        """
        if BARRIER_SYNC is None or not _flush(fd, BARRIER_SYNC):
            self.sync(fd)

    def complete_barriers(self, fd: int) -> None:
        """Flush what barriers ordered; no-op where barriers are `sync`."""
        if BARRIER_SYNC is not None:
            self.sync(fd)

    def read(self, fd: int) -> bytes:
        """Read everything from here to the end into one buffer.

        Not mapped: a file that shrinks, or a drive pulled out under a map, kills the process.
        """
        return self.open(fd).readall()

    def open(self, fd: int) -> FileIO:
        """Unbuffered file over `fd`, which stays open after it."""
        return FileIO(fd, "rb", closefd=False)


def because(error: OSError) -> str:
    """The reason why the disk refused, and the remedy."""
    return WHY.get(error.errno or 0) or (error.strerror or str(error)).lower()


def refused(failure: str, error: OSError) -> StackError:
    """Error for a refused operation; `failure`: "a.bin was not saved"."""
    kind = DiskFull if error.errno in FULL else StackError
    return kind(f"{failure}: {because(error)}")


def _flush(fd: int, command: int) -> bool:
    """Whether the file system supports this; network disks do not."""
    try:
        fcntl.fcntl(fd, command)
    except OSError as error:
        if error.errno in UNKNOWN:
            return False
        raise
    return True


# No slot file, agent or key may be called so: none of their alphabets allows two dots in front.
TEMPORARY = "..tmp-"
Flush = Callable[[int], None]
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
T = TypeVar("T")


def open_private(directory: Path, disk: Disk) -> None:
    """Create `directory` (0700) if missing. Raises SetupError if unusable."""
    try:
        make_private(directory, disk.sync)
    except OSError as error:
        raise SetupError(f"the folder {directory} cannot be created: {because(error)}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise SetupError(
            f"the folder {directory} is not writable; "
            "check who owns it, and that its disk is not mounted read-only"
        )


def make_private(directory: Path, flush: Flush) -> None:
    """Create `directory` and its missing parents, each 0700. Raises OSError."""
    if directory.is_dir():
        return
    make_private(directory.parent, flush)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent, flush)


def write_atomic(
    path: Path, chunks: Iterable[bytes | memoryview], disk: Disk, *, is_durable: bool = True
) -> int:
    """Replace `path` (0600) by the bytes of `chunks`; how many they were.

    After a crash at any point the old file is there, or the new one. A file that is not
    `is_durable` is on the medium before whatever is written to its volume later, and after
    `Disk.complete_barriers` at the latest.
    Raises StackError when the disk refuses; then the old file is untouched.
    """
    flush = disk.sync if is_durable else disk.barrier
    parts = [memoryview(chunk) for chunk in chunks]
    disk.admit(sum(part.nbytes for part in parts))
    try:
        make_private(path.parent, flush)
        fd, temporary = open_temporary(path.parent)
        try:
            n_bytes = sum(write_all(fd, part, disk) for part in parts)
            # The sync of the folder below brings both to the medium.
            disk.barrier(fd)
            _replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_directory(path.parent, flush)
    except OSError as error:
        raise refused(f"{path.name} was not saved", error) from error
    return n_bytes


def _replace(temporary: Path, path: Path) -> None:
    """Put a file in its place; a folder there is set aside. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.folder")
        path.rename(aside)
        log.warning("moved a folder out of the way: %s -> %s", path.name, aside)
    temporary.replace(path)


def remove_folder(path: Path, disk: Disk) -> None:
    """Remove a whole folder, atomically. Raises OSError."""
    # No new folder to replace: a full disk has no room for one.
    doomed = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    path.replace(doomed)
    sync_directory(path.parent, disk.sync)
    shutil.rmtree(doomed)


def sync_directory(directory: Path, flush: Flush) -> None:
    """Flush the names in `directory`, where the file system can. Raises OSError."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder of another user, such as /home
        return
    try:
        flush(fd)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:  # some network disks have no such thing
            raise
    finally:
        os.close(fd)


def read_whole(path: Path, disk: Disk) -> bytes:
    """Read a regular file, never through a link. Raises NotFound, Damaged."""
    with opened(path) as fd:
        return disk.read(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file to read, never through a link.

    Raises NotFound, Damaged, or Unreadable for whatever the disk refuses meanwhile.
    """
    try:
        with _regular(path) as fd:
            yield fd
    except FileNotFoundError:
        raise NotFound(f"there is no file {path.name}") from None
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {because(error)}") from error


def parse_json(data: bytes, kind: type[T]) -> T:
    """Raises Damaged when `data` is not the JSON of a `kind`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise Damaged(f"it is truncated or something else: {error}") from None


@contextmanager
def naming(title: str, remedy: str = "") -> Iterator[None]:
    """Name what was read in Damaged and UnknownVersion."""
    try:
        yield
    except UnknownVersion as error:
        raise UnknownVersion(
            f"the {title} was written by another release of mlx-stack: {error.message}{remedy}"
        ) from None
    except Damaged as error:
        raise Damaged(f"the {title} is damaged: {error.message}") from None


def begins_with(path: Path, magic: bytes, disk: Disk) -> bool:
    """Whether `path` is a regular file that begins with `magic`. Raises Unreadable.

    False for links, and for files of other users.
    """
    if not path.is_file() or path.is_symlink() or not os.access(path, os.R_OK):
        return False
    with suppress(NotFound), opened(path) as fd, disk.open(fd) as file:
        return file.read(len(magic)) == magic
    return False


def children(directory: Path) -> list[Path]:
    """Sorted entries of a folder; none without a folder. Raises Unreadable.

    `Path.glob` leaves out entries that it cannot read.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unreadable(f"{directory.name} cannot be read: {because(error)}") from error


def touch(path: Path) -> bool:
    """Note a use in the modification time.

    False without a file; a link is none.
    """
    now = time.time_ns()  # by itself the system would note one and the same tick for many files
    with suppress(OSError):
        os.utime(path, ns=(now, now), follow_symlinks=False)
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def clear_leftovers(paths: Iterable[Path]) -> int:
    """Remove temporary files of dead writers; how many.

    Temporary folders are half-finished removals, which are completed.
    """
    return sum(_clear(path) for path in tuple(paths))


def open_temporary(directory: Path) -> tuple[int, Path]:
    """Open a new file, locked to show that its writer lives."""
    while True:
        fd, name = tempfile.mkstemp(prefix=TEMPORARY, dir=directory)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, Path(name)
        os.close(fd)  # cleared away in the instant before the lock


@contextmanager
def _regular(path: Path) -> Iterator[int]:
    # O_NONBLOCK: opening a named pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Damaged(f"{path.name} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def _clear(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    with suppress(OSError, Damaged), _regular(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def write_all(fd: int, data: memoryview, disk: Disk) -> int:
    """Write all of `data`; how many bytes it has. Raises OSError."""
    n_done = 0
    while n_done < data.nbytes:
        n_done += disk.write(fd, data[n_done:])
    return n_done
