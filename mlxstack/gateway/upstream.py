"""HTTP client of a member: connections that are kept, bodies that are passed on as they come."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpResponseParser

from mlxstack.api.streaming import cancel, until_disconnect

KEPT_S = 15.0
"""Seconds that an idle connection is kept: well below the limit of the member."""

MOST_KEPT = 64
READ_BYTES = 256 * 1024
CONNECT_S = 5.0

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"expect", b"content-length",
})  # fmt: skip
KEYS = frozenset({b"authorization", b"x-api-key"})
OWN = frozenset({b"date", b"server"})
"""Headers that the gateway's own web server adds."""

Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class MemberLost(Exception):
    """The member did not answer, or stopped in the middle of an answer.

    `is_sent` tells that it may have read the request.
    """

    def __init__(self, why: str, *, is_sent: bool = True) -> None:
        super().__init__(why)
        self.is_sent = is_sent


class ResponseReader:
    """Callbacks of the parser: what has come of a response and was not passed on yet."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.is_headed = False
        self.is_complete = False
        self._body: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note the end of the head."""
        self.is_headed = True

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self.is_complete = True

    def take(self) -> bytes:
        """The pieces that came since the last call, as one."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body


class MemberConnection:
    """MemberConnection to a member, idle since `idle_at`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.idle_at = 0.0

    @property
    def is_usable(self) -> bool:
        """False for one that was closed, or that the member may be closing."""
        is_open = not (self.reader.at_eof() or self.writer.is_closing())
        return is_open and time.monotonic() - self.idle_at < KEPT_S


class Upstream:
    """Address of a member, and the connections to it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._kept: list[MemberConnection] = []

    async def forward(
        self, scope: Any, body: bytes, key: str, receive: Receive, send: Send
    ) -> bool:
        """Pass a request on and its response back; False where the client left.

        Raises MemberLost.
        """
        connection = await self._connect()
        leaving = asyncio.create_task(until_disconnect(receive))
        leaving.add_done_callback(
            lambda task: None if task.cancelled() else connection.writer.transport.abort()
        )
        is_kept = False
        try:
            connection.writer.write(request_head(scope, len(body), key))
            connection.writer.write(body)
            is_kept = await _relay(connection.reader, send, has_body=scope["method"] != "HEAD")
        except OSError as why:
            if not leaving.done():
                raise MemberLost(str(why)) from why
        except MemberLost:
            if not leaving.done():
                raise
        finally:
            is_left = leaving.done()
            await cancel(leaving)
            if is_kept and not is_left:
                self._keep(connection)
            else:
                connection.writer.transport.abort()
        return not is_left

    def close(self) -> None:
        """Close the idle connections."""
        for one in self._kept:
            one.writer.close()
        self._kept.clear()

    async def _connect(self) -> MemberConnection:
        while self._kept:
            connection = self._kept.pop()
            if connection.is_usable:
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, limit=READ_BYTES
                )
        except (OSError, TimeoutError) as why:
            raise MemberLost(str(why) or "no connection", is_sent=False) from why
        return MemberConnection(reader, writer)

    def _keep(self, connection: MemberConnection) -> None:
        connection.idle_at = time.monotonic()
        if len(self._kept) < MOST_KEPT:
            self._kept.append(connection)
        else:
            connection.writer.close()


async def _relay(reader: asyncio.StreamReader, send: Send, *, has_body: bool) -> bool:
    """Pass a response on as it comes; True where the connection can be used again."""
    response = ResponseReader()
    parser = HttpResponseParser(response)
    is_begun = False
    while not response.is_complete:
        data = await reader.read(READ_BYTES)
        if not data:
            raise MemberLost("the connection was closed")
        parser.feed_data(data)
        if response.is_headed and not is_begun:
            is_begun = True
            headers = _returned(response.headers)
            status = parser.get_status_code()
            await send({"type": "http.response.start", "status": status, "headers": headers})
            if not has_body:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return False
        more, body = not response.is_complete, response.take()
        if is_begun and (body or not more):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    return bool(parser.should_keep_alive())


def request_head(scope: Any, n_body: int, key: str) -> bytes:
    """Head of the request to a member: the client's, with the key of the gateway."""
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [
        name + b": " + value
        for name, value in scope["headers"]
        if name not in HOP_BY_HOP and name not in KEYS
    ]
    lines += [b"authorization: Bearer " + key.encode(), b"content-length: %d" % n_body, b"", b""]
    return b"\r\n".join(lines)


def _returned(headers: Iterable[Header]) -> list[Header]:
    dropped = (HOP_BY_HOP | OWN) - {b"content-length"}
    return [(name, value) for name, value in headers if name not in dropped]
