"""HTTP client of timed streams, parsed after they came."""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import h11
from msgspec import Struct

from mlxstack.client.errors import Unreachable

TIMEOUT_S = 900.0
LAST_CHUNK = b"0\r\n\r\n"

Pieces = Sequence[tuple[float, bytes]]
"""Bytes with their arrival, in seconds."""


class ReceivedStream(Struct, frozen=True):
    """Response whose pieces have their arrival, in seconds."""

    status: int
    headers: Mapping[str, str]
    started: float
    pieces: tuple[tuple[float, bytes], ...]
    ended: float

    @property
    def body(self) -> bytes:
        """All pieces."""
        return b"".join(data for _, data in self.pieces)


def event_data(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """Data of server-sent events, one line each, without the last event `[DONE]`."""
    unread = b""
    for moment, chunk in pieces:
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield moment, data


class StreamClient:
    """Streams from one server, over connections that are kept.

    A piece costs no more than a read and a time: the server under test needs the CPU on a machine
    of few cores.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = urlsplit(url)
        self._headers = {"Host": self._url.netloc, "Content-Type": "application/json", **headers}
        self._idle: list[asyncio.Transport] = []

    async def close(self) -> None:
        """Close idle connections; streams that run end with theirs."""
        while self._idle:
            self._idle.pop().abort()
        # A transport closes its socket in the next iteration of the loop.
        await asyncio.sleep(0)

    async def post(
        self, path: str, content: bytes, is_enough: Callable[[], bool]
    ) -> ReceivedStream:
        """Send a body and read the response until `is_enough`.

        Raises Unreachable when nothing answers, or the connection breaks.
        """
        headers = {**self._headers, "Content-Length": str(len(content))}
        exchange = Exchange(
            h11.Request(method="POST", target=self._url.path + path, headers=[*headers.items()]),
            content,
            is_enough,
        )
        try:
            await self._begin(exchange)
            async with asyncio.timeout(TIMEOUT_S):
                await exchange.ended
            received = exchange.received()
        except (OSError, h11.ProtocolError) as error:
            raise Unreachable(f"no answer from {self._url.geturl()}{path} ({error})") from error
        finally:
            if exchange.transport is not None and exchange.is_reusable:
                self._idle.append(exchange.transport)
            elif exchange.transport is not None:
                exchange.transport.abort()
        return received

    async def _begin(self, exchange: "Exchange") -> None:
        # The server may have closed an idle connection.
        self._idle = [transport for transport in self._idle if not transport.is_closing()]
        if self._idle:
            transport = self._idle.pop()
            transport.set_protocol(exchange)
            exchange.connection_made(transport)
            return
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        port = self._url.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        host = self._url.hostname or ""
        await loop.create_connection(lambda: exchange, host, port, ssl=secure)


class Exchange(asyncio.Protocol):
    """Request and the pieces of its response.

    `ended` is the time of the last one; it fails with OSError or h11's ProtocolError.
    """

    def __init__(self, request: h11.Request, content: bytes, is_enough: Callable[[], bool]) -> None:
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._started = time.perf_counter()
        self._http = h11.Connection(h11.CLIENT)
        events = (request, h11.Data(data=content), h11.EndOfMessage())
        self._sent = b"".join(self._http.send(event) or b"" for event in events)
        self._is_enough = is_enough
        self._unparsed: list[tuple[float, bytes]] = []
        self._pieces: list[tuple[float, bytes]] = []
        self._response: h11.Response | None = None
        self._is_chunked = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection may be used for another exchange."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def received(self) -> ReceivedStream:
        """The response, once it has ended. Raises h11's ProtocolError."""
        self._parse()
        assert self._response is not None
        headers = {name.decode(): value.decode() for name, value in self._response.headers}
        return ReceivedStream(
            self._response.status_code,
            headers,
            self._started,
            tuple(self._pieces),
            self.ended.result(),
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        """Note a piece; the head, and a possible end, are parsed now."""
        now = time.perf_counter()
        if self.ended.done():
            return
        self._unparsed.append((now, data))
        is_over = self._response is not None and self._is_enough()
        may_end = not self._is_chunked or not data or data.endswith(LAST_CHUNK)
        try:
            is_over = is_over or (may_end and self._parse())
        except h11.ProtocolError as error:
            self.ended.set_exception(error)
            return
        if is_over:
            self.ended.set_result(now)

    def eof_received(self) -> None:
        """The server has closed the connection, which ends some responses."""
        self.data_received(b"")

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what has not ended."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the connection was closed"))

    def _parse(self) -> bool:
        """Take in what has come; whether the response is whole.

        Raises h11's RemoteProtocolError for what is no HTTP, or ends too early.
        """
        unparsed = self._unparsed
        self._unparsed = []
        for moment, data in unparsed:
            self._http.receive_data(data)
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    self._response = event
                    encoding = dict(event.headers).get(b"transfer-encoding", b"")
                    self._is_chunked = encoding.lower() == b"chunked"
                elif isinstance(event, h11.Data):
                    self._pieces.append((moment, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    return True
        return False
