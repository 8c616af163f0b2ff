"""A disk whose reads a test holds back."""

import threading

from mlxstack.store.files import Disk
from tests.engine.harness import WAIT_S


class Gate(Disk):
    """Nothing is read while it is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()

    def read(self, fd: int) -> bytes:
        assert self.is_open.wait(WAIT_S)
        return super().read(fd)
