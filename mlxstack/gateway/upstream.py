"""HTTP client of a member, with connection reuse and streamed bodies."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from mlxstack.api.disconnect import cancel, until_disconnect
from mlxstack.host.macos import local_network_hint

KEPT_S = 15.0
"""Seconds that an idle connection is kept: well below the limit of the member."""

MAX_KEPT = 64
MAX_HELD_BYTES = 256 * 1024
"""Bytes of a response that wait for the client before the connection is read no further.

The kernel holds about as much.
"""

CONNECT_S = 5.0
WATCH_S = 0.02
"""Seconds until a client that leaves is noticed."""

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"expect", b"content-length",
})  # fmt: skip
NOT_SENT = HOP_BY_HOP | {b"content-encoding"}
"""Headers that are not forwarded; bodies are decoded already."""
KEYS = frozenset({b"authorization", b"x-api-key"})
NOT_RETURNED = (HOP_BY_HOP - {b"content-length"}) | {b"date", b"server"}
"""Headers that the gateway's own web server adds are left to it."""

Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class MemberLost(Exception):
    """No response of the member, or an incomplete one.

    `is_sent` tells that it may have read the request.
    """

    def __init__(self, reason: str, *, is_sent: bool = True) -> None:
        super().__init__(reason)
        self.is_sent = is_sent


class ResponseReader:
    """Parser callbacks that collect a response for forwarding."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.is_headed = False
        self.is_complete = False
        self.n_bytes = 0
        self._body: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self.n_bytes += len(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def is_last(self) -> bool:
        """Whether the member closes the connection after it."""
        # The parser itself knows this only before the end of the response.
        options = (value.lower() for name, value in self.headers if name == b"connection")
        return b"close" in options

    def take(self) -> bytes:
        """The pieces that came since the last call, as one."""
        body = b"".join(self._body)
        self._body.clear()
        self.n_bytes = 0
        return body


class MemberConnection(asyncio.Protocol):
    """Connection to a member, idle since `idle_at`."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.idle_at = 0.0
        self._fault = ""
        self._news = asyncio.Event()
        self._response = ResponseReader()
        self._parser = HttpResponseParser(self._response)

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, and not about to close."""
        is_open = not (self._fault or self.transport.is_closing())
        return is_open and time.monotonic() - self.idle_at < KEPT_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Left alone, kernels let it grow to tens of megabytes while a client reads fast.
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_HELD_BYTES)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; pause while the client is behind."""
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fault = f"the response is no HTTP: {error}"
            self.transport.abort()
        if self._response.n_bytes > MAX_HELD_BYTES:
            self.transport.pause_reading()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fault = self._fault or str(exc or "the connection was closed")
        self._news.set()

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; its response is the next to be read."""
        self._response = ResponseReader()
        self._parser = HttpResponseParser(self._response)
        self._news.clear()
        self.transport.writelines((head, body))

    async def relay(self, send: Send, *, has_body: bool) -> bool:
        """Forward the response; True if the connection is reusable.

        Raises MemberLost.
        """
        response = self._response
        is_begun = False
        while True:
            await self._news.wait()
            self._news.clear()
            if response.is_headed and not is_begun:
                is_begun = True
                headers = [header for header in response.headers if header[0] not in NOT_RETURNED]
                status = self._parser.get_status_code()
                await send({"type": "http.response.start", "status": status, "headers": headers})
                if not has_body:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return False
            more = not response.is_complete
            body = response.take()
            if is_begun and (body or not more):
                await send({"type": "http.response.body", "body": body, "more_body": more})
            # Also after the last piece: a kept connection that is not read answers no more.
            self.transport.resume_reading()
            if not more:
                return not response.is_last
            if self._fault:
                raise MemberLost(self._fault)


class Upstream:
    """Address of a member, and the connections to it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or 0
        self._kept: list[MemberConnection] = []
        self._is_closed = False

    async def forward(
        self, scope: Any, body: bytes, key: str, receive: Receive, send: Send
    ) -> bool:
        """Forward a request and its response; False for a disconnect.

        Raises MemberLost.
        """
        connection = await self._connect()
        leaving: asyncio.Task[Any] | None = None

        def watch() -> None:
            nonlocal leaving
            leaving = asyncio.create_task(until_disconnect(receive))
            leaving.add_done_callback(
                lambda task: None if task.cancelled() else connection.transport.abort()
            )

        # Most responses are there before a task would be worth its time.
        watching = asyncio.get_running_loop().call_later(WATCH_S, watch)
        is_kept = is_left = False
        try:
            connection.send(request_head(scope, len(body), key), body)
            is_kept = await connection.relay(send, has_body=scope["method"] != "HEAD")
        except MemberLost:
            if leaving is None or not leaving.done():
                raise
        finally:
            watching.cancel()
            if leaving is not None:
                is_left = leaving.done()
                await cancel(leaving)
            if is_kept and not is_left:
                self._keep(connection)
            else:
                connection.transport.abort()
        return not is_left

    def close(self) -> None:
        """Close the idle connections, and those of running requests at their end."""
        self._is_closed = True
        for connection in self._kept:
            connection.transport.close()
        self._kept.clear()

    async def _connect(self) -> MemberConnection:
        while self._kept:
            connection = self._kept.pop()
            if connection.is_usable:
                return connection
            connection.transport.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, opened = await loop.create_connection(MemberConnection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            reason = f"{str(error) or 'no connection'}{local_network_hint(error)}"
            raise MemberLost(reason, is_sent=False) from error
        return opened

    def _keep(self, connection: MemberConnection) -> None:
        connection.idle_at = time.monotonic()
        if len(self._kept) < MAX_KEPT and not self._is_closed:
            self._kept.append(connection)
        else:
            connection.transport.close()


def request_head(scope: Any, n_body: int, key: str) -> bytes:
    """Request head for the member, with the gateway's key."""
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [
        name + b": " + value
        for name, value in scope["headers"]
        if name not in NOT_SENT and name not in KEYS
    ]
    lines += [b"authorization: Bearer " + key.encode(), b"content-length: %d" % n_body, b"", b""]
    return b"\r\n".join(lines)
