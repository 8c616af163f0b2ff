"""Stands between a client and a service: keeps their messages, and can cut an answer."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
from msgspec import Struct, field

from tests.patience import PATIENCE_S

CHUNK = 65536


class Exchange(Struct):
    """One request and its response; `status` is None until the response begins."""

    method: str
    path: str
    body: bytearray = field(default_factory=bytearray)
    status: int | None = None
    headers: dict[str, str] = {}
    answer: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)
    """Seconds of a monotonic clock, as `ended`, the arrival of the answer's last byte so far."""
    ended: float = 0.0

    @property
    def json(self) -> dict[str, Any]:
        """The request's body."""
        return dict(json.loads(self.body))


class Observer:
    """Reads the messages of one connection, and adds each request to `exchanges`."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges
        self._exchange = Exchange("", "")
        self._service = h11.Connection(h11.SERVER)
        self._client = h11.Connection(h11.CLIENT)

    def sent(self, data: bytes) -> None:
        """Bytes of the client."""
        self._service.receive_data(data)
        self._read_requests()

    def received(self, data: bytes) -> None:
        """Bytes of the service."""
        self._client.receive_data(data)
        while not _is_pause(event := self._client.next_event()):
            self._service.send(event)
            if isinstance(event, h11.Response):
                self._exchange.status = event.status_code
                headers = {name.decode(): value.decode() for name, value in event.headers}
                self._exchange.headers = headers
            elif isinstance(event, h11.Data):
                self._exchange.answer += event.data
                self._exchange.ended = time.monotonic()
            elif isinstance(event, h11.EndOfMessage) and self._client.our_state is h11.DONE:
                self._client.start_next_cycle()
                self._service.start_next_cycle()
                self._read_requests()

    def _read_requests(self) -> None:
        while not _is_pause(event := self._service.next_event()):
            self._client.send(event)
            if isinstance(event, h11.Request):
                self._exchange = Exchange(event.method.decode(), event.target.decode())
                self._exchanges.append(self._exchange)
            elif isinstance(event, h11.Data):
                self._exchange.body += event.data


def _is_pause(event: Any) -> bool:
    return event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed)


class Relay:
    """`exchanges` are those of all connections. `cuts` is how many answers are cut, `after` so
    many bytes, of those to a request that holds `to`.
    """

    def __init__(self, upstream: str, to: bytes = b"", after: int = 0, cuts: int = 0) -> None:
        where = urlsplit(upstream)
        self.exchanges: list[Exchange] = []
        self.sent = bytearray()
        self.n_cut = 0
        self.url = ""
        self._host = where.hostname or ""
        self._port = where.port or 80
        self._to = to
        self._after = after
        self._cuts = cuts

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        heard = bytearray()
        observer = Observer(self.exchanges)
        tasks = (
            asyncio.create_task(self._forth(reader, back_writer, heard, observer)),
            asyncio.create_task(self._back(back_reader, writer, heard, observer)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for stream in (writer, back_writer):
                stream.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forth(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: bytearray,
        observer: Observer,
    ) -> None:
        while piece := await reader.read(CHUNK):
            self.sent.extend(piece)
            heard.extend(piece)
            observer.sent(piece)
            writer.write(piece)
            await writer.drain()

    async def _back(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: bytearray,
        observer: Observer,
    ) -> None:
        n_bytes = 0
        while piece := await reader.read(CHUNK):
            n_bytes += len(piece)
            observer.received(piece)
            writer.write(piece)
            await writer.drain()
            if self.n_cut < self._cuts and self._to in heard and n_bytes >= self._after:
                self.n_cut += 1
                return


@contextmanager
def relaying(relay: Relay) -> Iterator[Relay]:
    """Listening on a free port of its own."""
    started = threading.Event()
    leaving = asyncio.Event()
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
