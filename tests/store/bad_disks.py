"""Disks that refuse, each a small honest implementation of `store.disk.Disk`."""

import errno
import os
from io import FileIO

from mlxstack.store.files import Disk


class FullDisk(Disk):
    """Takes `room` bytes, then says that it is full."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room = room
        self.code = code

    def write(self, fd: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        n_done = super().write(fd, data[: self.room])
        self.room -= n_done
        return n_done


class StutteringDisk(Disk):
    """Takes at most three bytes at a time, as write(2) may."""

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:3])


class UnsyncableDisk(Disk):
    """Takes everything, and fails to bring it to the medium."""

    def sync(self, fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class UnreadableDisk(Disk):
    """Has a bad sector in every file."""

    def read(self, fd: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, fd: int) -> FileIO:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
