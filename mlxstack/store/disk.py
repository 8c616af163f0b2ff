"""The system calls that a disk may refuse, with the refusal in words for people."""

import errno
import os

from mlxstack.core.errors import StackError

WHY = {
    errno.ENOSPC: "the disk is full; free some space or run `mlx-stack cache gc`",
    errno.EDQUOT: "your disk quota is used up; free some space or run `mlx-stack cache gc`",
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
    """The real disk. A test hands in one that is full, or broken."""

    def write(self, fd: int, data: memoryview) -> int:
        """How many bytes of `data` were taken; at least one, or OSError."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Return when what was written is on the medium."""
        os.fsync(fd)

    def read(self, fd: int) -> bytes:
        """Everything from here to the end, in one buffer of exactly that size.

        Not mapped: a file that shrinks, or a drive pulled out under a map, kills the process.
        """
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            return file.readall()


def because(error: OSError) -> str:
    """Why the disk refused, and what to do."""
    return WHY.get(error.errno or 0) or (error.strerror or str(error)).lower()


def refused(what: str, error: OSError) -> StackError:
    """The error to raise when `what` (a clause such as "a.bin was not saved") was refused."""
    return StackError(f"{what}: {because(error)}")
