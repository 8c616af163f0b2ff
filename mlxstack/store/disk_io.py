"""Disk system calls, and their errors as messages for users."""

import errno
import fcntl
import os
import sys
from io import FileIO

from mlxstack.core.errors import DiskFull, StackError

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
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            return file.readall()

    def open(self, fd: int) -> FileIO:
        """Unbuffered file over `fd`, which stays open after it."""
        return FileIO(fd, "rb", closefd=False)


def because(error: OSError) -> str:
    """The reason why the disk refused, and the remedy."""
    return WHY.get(error.errno or 0) or (error.strerror or str(error)).lower()


def refused(what: str, error: OSError) -> StackError:
    """Error for a refused operation; `what`: "a.bin was not saved"."""
    kind = DiskFull if error.errno in FULL else StackError
    return kind(f"{what}: {because(error)}")


def _flush(fd: int, command: int) -> bool:
    """Whether the file system supports this; network disks do not."""
    try:
        fcntl.fcntl(fd, command)
    except OSError as error:
        if error.errno in UNKNOWN:
            return False
        raise
    return True
