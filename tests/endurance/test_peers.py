"""A slice of the faults between two services; `make soak` runs all of them."""

import asyncio
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from mlxstack.features.remote_kv.peers import Peer
from mlxstack.store.files import Disk
from mlxstack.store.kv_store import DiskKVStore
from tests.endurance.peers import peers

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]

LIES = (
    "match: a flood",
    "offer: no files",
    "file: another bit",
    "missing: everything, again and again",
    "adopted: no JSON",
)


def test_a_peer_that_fails_or_lies_changes_no_answer_and_loses_no_agent(tmp_path: Path) -> None:
    outcome = peers(tmp_path, seed=1, n_wire=3, lies=LIES)
    assert outcome.n_met >= 2
    assert outcome.n_backed_off >= 3
    assert outcome.n_compared > 15


@pytest.mark.soak
def test_all_lies_and_a_hundred_faults_of_the_connection(tmp_path: Path) -> None:
    assert peers(tmp_path, seed=2, n_wire=100).n_met > 60


class HeldDisk(Disk):
    """Its first write waits; `kept` tells whether the file was open behind it."""

    def __init__(self) -> None:
        self.is_writing, self.may_go_on = threading.Event(), threading.Event()
        self.kept: bool | None = None

    def write(self, fd: int, data: memoryview) -> int:
        if self.kept is None:
            self.kept = False
            before = os.fstat(fd).st_ino
            self.is_writing.set()
            self.may_go_on.wait()
            with suppress(OSError):
                self.kept = os.fstat(fd).st_ino == before
        return super().write(fd, data)


def test_a_file_that_is_being_written_is_not_closed_by_a_cancel(tmp_path: Path) -> None:
    """Its descriptor would be that of another file by then."""

    def send(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2097152\r\n\r\n")
            connection.sendall(bytes(1 << 21))

    async def main(url: str, disk: HeldDisk) -> None:
        store = DiskKVStore(tmp_path, disk)
        peer = Peer(url, None)
        task = asyncio.create_task(peer.download(store, ("ab" * 16, "cd" * 32), 1 << 22))
        await asyncio.to_thread(disk.is_writing.wait)
        task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        disk.may_go_on.set()
        with suppress(asyncio.CancelledError):
            await task
        await peer.close()

    disk = HeldDisk()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = threading.Thread(target=send, args=(listener,))
        sending.start()
        asyncio.run(main(f"http://127.0.0.1:{listener.getsockname()[1]}", disk))
        sending.join()
    assert disk.kept
    assert not list(tmp_path.rglob("..tmp-*"))
