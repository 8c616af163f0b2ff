"""Stands between a client and a service: keeps what the client sends, and can cut an answer."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S

CHUNK = 65536


class Relay:
    """`sent` is all that clients sent. `cuts` is how many answers are cut, `after` so many bytes,
    of those to a request that holds `to`.
    """

    def __init__(self, upstream: str, to: bytes = b"", after: int = 0, cuts: int = 0) -> None:
        where = urlsplit(upstream)
        self.sent = bytearray()
        self.n_cut = 0
        self.url = ""
        self._host, self._port = where.hostname or "", where.port or 80
        self._to, self._after, self._cuts = to, after, cuts

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        heard = bytearray()
        tasks = (
            asyncio.create_task(self._forth(reader, back_writer, heard)),
            asyncio.create_task(self._back(back_reader, writer, heard)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for one in (writer, back_writer):
                one.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forth(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray
    ) -> None:
        while piece := await reader.read(CHUNK):
            self.sent.extend(piece)
            heard.extend(piece)
            writer.write(piece)
            await writer.drain()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray
    ) -> None:
        n_bytes = 0
        while piece := await reader.read(CHUNK):
            n_bytes += len(piece)
            writer.write(piece)
            await writer.drain()
            if self.n_cut < self._cuts and self._to in heard and n_bytes >= self._after:
                self.n_cut += 1
                return


@contextmanager
def relaying(relay: Relay) -> Iterator[Relay]:
    """Listening on a free port of its own."""
    started, leaving = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await leaving.wait()
        server.close()

    # `run` ends the connections that clients left open.
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield relay
    finally:
        loops[0].call_soon_threadsafe(leaving.set)
        thread.join(PATIENCE_S)
