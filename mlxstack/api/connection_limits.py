"""Connection limits: count, time to receive a request, time to take output.

A client needs no key to open a connection, so idle ones must not use up the descriptors. The length
of answers and the time until they come are not bounded here. Requests with a faulty head are
refused before the application sees them.
"""

import asyncio
import logging
import posixpath
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mlxstack.api import errors
from mlxstack.api.protocols import dialect_of
from mlxstack.core.errors import BadRequest, Busy, StackError, UpgradeRefused

log = logging.getLogger("mlxstack.connections")

# Request head; its longest lines are keys and cookies.
MAX_HEAD_BYTES = 64 * 1024
MAX_CONNECTIONS = 4096
# The other descriptors are for files, and for accepted connections that are not counted yet.
SHARE_OF_DESCRIPTORS = 0.75
# A request whose path is not known yet is answered as OpenAI would.
UNREAD = "/v1/"
HEAD_S = 30.0
BODY_S = 300.0
MAX_HELD_BYTES = 64 * 1024
STALLED_S = 300.0
"""Seconds in which a client that is behind must take something."""
MAX_TAKE_S = 1800.0
"""Seconds for a client to take an answer after its end."""
MAX_UNREAD_BYTES = 32 * 2**20
"""Bytes of an answer that wait for its client before the answer itself waits."""
MAX_UNREAD_IN_ALL = 256 * 2**20
"""Bytes of all answers that wait for clients."""
MAX_WAIT_S = 60.0
"""Seconds that an answer waits, with all that is held for its request."""
UNREAD_STEP = 2**20
"""Bytes of an answer between two looks at the sum of all."""
PROBE_S = 0.5
"""Seconds between writes to a client that has closed its sending side."""

HEAD = "head"
BODY = "body"
OUTPUT = "output"
WAIT = "wait"
PROBE = "probe"
"""Timers of a connection: parts of a request, unread output, an answer that waits, a probe."""

BAD_REQUEST = 400
REQUEST_TIMEOUT = 408
HEAD_TOO_LARGE = 431
VERSIONS = (b"1.0", b"1.1")
OTHER_VERSION = "this service speaks HTTP/1.1 and HTTP/1.0"
LONG_HEAD = f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes; shorten them"

ABSOLUTE = ("http://", "https://")
WEBSOCKET = b"websocket"


def canonical_path(path: str) -> str:
    """Path without empty and dot segments or a final slash.

    Routers join slashes and drop the last one; decisions by the path see what they see.
    """
    if path.startswith("/"):
        return posixpath.normpath("/" + path.lstrip("/"))
    return path


def normalize(scope: Any) -> None:
    """Set the canonical path and host of a scope.

    RFC 9112, 3.2.2: a server accepts the absolute form, and its host replaces the Host header.
    """
    path = scope["path"]
    if path.lower().startswith(ABSOLUTE):
        try:
            target = urlsplit(scope["raw_path"].decode("latin-1"))
        except ValueError:  # an unreadable host; no route has such a path
            return
        host = target.netloc.rpartition("@")[2]
        path = unquote(target.path) or "/"
        kept_headers = [header for header in scope["headers"] if header[0] != b"host"]
        scope["headers"] = [*kept_headers, (b"host", host.encode("latin-1"))]
    scope["path"] = canonical_path(path)
    scope["raw_path"] = quote(scope["path"]).encode("ascii")


def head_fault(headers: Sequence[tuple[bytes, bytes]], upgrade: bytes | None) -> StackError | None:
    """Reason to refuse a request by its head, or None.

    RFC 9112, 6.3: two lengths may be an attempt of request smuggling. RFC 9110, 15.5.22: clients
    that get 426 go on over HTTP.
    """
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return BadRequest("content-length and transfer-encoding exclude each other; send one")
    if upgrade is not None and WEBSOCKET in re.split(rb"[\s,/]+", upgrade):
        return UpgradeRefused("this service has no WebSockets; send the request over HTTP")
    return None


def connection_limit() -> int:
    """Most connections at a time, well below the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, int(soft * SHARE_OF_DESCRIPTORS))


class BoundedParser(h11.Connection):
    """HTTP parser with a bound on whole heads and trailers, too.

    h11 itself bounds those that are not complete yet.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)

    def next_event(self) -> Any:
        """The next event.

        Raises RemoteProtocolError for a long head or another version of HTTP.
        """
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            n_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
            if isinstance(event, h11.Request):
                n_bytes += len(event.method) + len(event.target)
                if event.http_version not in VERSIONS:
                    raise h11.RemoteProtocolError(OTHER_VERSION)
            if n_bytes > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError(LONG_HEAD, HEAD_TOO_LARGE)
        return event


class JoinedWrites:
    """Transport that joins the writes of one loop iteration.

    Head and body of a short answer are one packet then, for which the client wakes once.
    `before_write` may abort the transport.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        before_write: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._before_write = before_write
        self._held: list[bytes] = []
        self._n_bytes = 0
        self._n_written = 0

    @property
    def n_unread(self) -> int:
        """Bytes that the client has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def n_taken(self) -> int:
        """Bytes that the client has taken."""
        return self._n_written - self.n_unread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the data in this iteration, at once where it is long."""
        if not data:
            return
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._n_bytes += len(data)
        if self._n_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send all that was written."""
        data = b"".join(self._held)
        self._held.clear()
        self._n_bytes = 0
        if not data or self._transport.is_closing():
            return
        self._before_write()
        if not self._transport.is_closing():
            self._n_written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after all that was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._held.clear()
        self._transport.abort()


class BoundedConnection(H11Protocol):
    """Connection with time limits for a request's head and body.

    It is over h11: httptools would keep any data before a body, however long.

    An answer to a POST, which has an end, is made at the pace of the model and waits here for a
    client that is slow: nothing else is held for it. Other streams wait for their clients.

    When there are too many connections, the one that has waited longest for a request is closed
    for the new one; if all are busy, the new one gets a 503.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: h11.Connection = BoundedParser()
        self._n_empty = 0
        self.behind_since: float | None = None
        self._n_taken = self._n_looked_at = 0
        self.waiting_since = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def is_waiting(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or refuse it with 503."""
        super().connection_made(transport)
        self._writes = JoinedWrites(transport, self.loop, self._bound_unread)
        self.transport = cast(asyncio.Transport, self._writes)
        self.waiting_since = time.monotonic()
        self._set_deadline()
        if len(self.connections) > connection_limit() and not self._close_longest_waiting():
            self._refuse(Busy("there are too many connections; come back later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time limits."""
        self._cancel(*self._timers)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; what is left of the request has a deadline."""
        super().data_received(data)
        self._set_deadline()

    def handle_events(self) -> None:
        """Read on; empty lines before a request line are ignored.

        RFC 9112, 2.2.
        """
        if self.conn.our_state is self.conn.their_state is h11.IDLE:
            data, _ = self.conn.trailing_data
            if data.startswith((b"\r", b"\n")):
                # h11 has no way to drop what it has been given.
                self.conn = BoundedParser()
                head = data.lstrip(b"\r\n")
                self._n_empty += len(data) - len(head)
                if self._n_empty > MAX_HEAD_BYTES:
                    self._refuse(BadRequest(LONG_HEAD), HEAD_TOO_LARGE)
                    return
                if head:
                    self.conn.receive_data(head)
        super().handle_events()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a whole request.

        A client that has left looks the same, but resets the connection when it is written to.
        """
        if self.is_waiting or self.conn.their_state is h11.SEND_BODY:
            return False
        self.cycle.keep_alive = False
        self._start(PROBE, PROBE_S, self._probe)
        return True

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be here already."""
        self._writes.flush()
        self._cancel(HEAD, BODY)
        self._n_empty = 0
        self.waiting_since = time.monotonic()
        if self.behind_since is not None:
            self.behind_since = self.waiting_since
        super().on_response_complete()
        if not self.is_waiting:
            self._set_deadline()

    def pause_writing(self) -> None:
        """Watch a client that is behind; an endless stream waits for it."""
        self.behind_since = time.monotonic()
        self._n_taken = self._writes.n_taken
        self._n_looked_at = 0
        if self.scope is None or self.scope["method"] != "POST":
            self.flow.pause_writing()
        self._start(OUTPUT, STALLED_S, self._look_at_client)

    def resume_writing(self) -> None:
        """Write on."""
        self.behind_since = None
        self._cancel(OUTPUT, WAIT)
        super().resume_writing()

    @property
    def n_unread(self) -> int:
        """Bytes that wait for a client that is behind."""
        if self.behind_since is None:
            return 0
        return self._writes.n_unread

    def end_unread(self, reason: str) -> None:
        """End a connection whose client is behind, and log why."""
        host = self.client[0] if self.client else "a client"
        n_unread = self._writes.n_unread
        log.warning("the connection of %s was ended: %s, %d bytes unread", host, reason, n_unread)
        self.behind_since = None
        self.transport.abort()

    def _look_at_client(self) -> None:
        """End the connection of a client that takes nothing, or too slowly."""
        n_taken_before = self._n_taken
        self._n_taken = self._writes.n_taken
        since = time.monotonic() - (self.behind_since or 0.0)
        if self._n_taken == n_taken_before:
            self.end_unread(f"its client took nothing of an answer for {STALLED_S:g} s")
        elif self.is_waiting and since > MAX_TAKE_S:
            self.end_unread(f"its client did not take an answer within {MAX_TAKE_S:g} s")
        else:
            self._start(OUTPUT, STALLED_S, self._look_at_client)

    def _bound_unread(self) -> None:
        """Bound the answers that wait for clients, before more is written.

        Beyond the bound for all, the client that has been behind for the longest time loses its
        answer.
        """
        n_unread = self.n_unread
        if n_unread > MAX_UNREAD_BYTES and WAIT not in self._timers:
            self.flow.pause_writing()
            reason = f"an answer waited {MAX_WAIT_S:g} s for its client"
            self._start(WAIT, MAX_WAIT_S, self.end_unread, reason)
        if n_unread > self._n_looked_at + UNREAD_STEP:
            self._n_looked_at = n_unread
            connections = (
                connection
                for connection in self.connections
                if isinstance(connection, BoundedConnection)
            )
            behind = [connection for connection in connections if connection.n_unread]
            if sum(connection.n_unread for connection in behind) > MAX_UNREAD_IN_ALL:
                oldest = min(behind, key=lambda connection: connection.behind_since or 0.0)
                oldest.end_unread("the answers that wait for clients are too long together")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, unless an answer has begun already."""
        fault = sys.exception()
        if str(fault) == OTHER_VERSION:
            self._refuse(BadRequest(OTHER_VERSION), BAD_REQUEST)
        elif (
            isinstance(fault, h11.RemoteProtocolError) and fault.error_status_hint == HEAD_TOO_LARGE
        ):
            self._refuse(BadRequest(LONG_HEAD), HEAD_TOO_LARGE)
        elif self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Normalize the head; True for a request that it has refused."""
        normalize(self.scope)
        self.headers = list(self.scope["headers"])
        return head_fault(self.headers, self._get_upgrade()) is not None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Refuse a request by its head, and close."""
        error = head_fault(self.headers, self._get_upgrade())
        assert error is not None
        self._refuse(error, path=self.scope["path"])

    def _probe(self) -> None:
        """Write to a half-closed connection, between the messages of its response."""
        if self.is_waiting or self.transport.is_closing():
            return
        if data := self._between():
            self.transport.write(data)
        self._start(PROBE, PROBE_S, self._probe)

    def _between(self) -> bytes:
        """Interim response, or heartbeat of a begun stream."""
        if not self.cycle.response_started:
            is_interim = self.scope["http_version"] != "1.0"
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            if is_interim:
                return self.conn.send(event) or b""
            return b""
        early = self.scope["state"].get("early_type", "")
        heartbeat = dialect_of(self.scope["path"]).heartbeat_of(early)
        if heartbeat:
            return self.conn.send(h11.Data(data=heartbeat)) or b""
        return b""

    def _set_deadline(self) -> None:
        """Start the time limit of the missing part, unless it runs."""
        if self.transport.is_closing():
            self._cancel(HEAD, BODY)
        elif self.is_waiting:
            self._start_deadline(HEAD, HEAD_S)
        elif self.conn.their_state is h11.SEND_BODY:
            self._cancel(HEAD)
            self._start_deadline(BODY, BODY_S)
        else:
            self._cancel(HEAD, BODY)

    def _start_deadline(self, part: str, limit_s: float) -> None:
        if part not in self._timers:
            self._start(part, limit_s, self._expire, part, limit_s)

    def _start(
        self, name: str, delay_s: float, action: Callable[..., None], *arguments: Any
    ) -> None:
        self._timers[name] = self.loop.call_later(delay_s, action, *arguments)

    def _cancel(self, *names: str) -> None:
        for name in names:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    def _expire(self, part: str, limit_s: float) -> None:
        del self._timers[part]
        has_begun = part == BODY or bool(self.conn.trailing_data[0])
        if has_begun:
            reason = f"the request was not there after {limit_s:g} s; send it without a pause"
            self._refuse(BadRequest(reason), REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _close_longest_waiting(self) -> bool:
        """Close the other connection that has waited longest for a request."""
        waiting = (
            connection
            for connection in self.connections
            if isinstance(connection, BoundedConnection)
            and connection is not self
            and connection.is_waiting
            and not connection.n_unread
            and not connection.transport.is_closing()
        )
        oldest = min(waiting, key=lambda connection: connection.waiting_since, default=None)
        if oldest is None:
            return False
        # Its descriptor is free after this iteration of the loop, so it no longer counts.
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    def _refuse(
        self, error: StackError, status: int | None = None, path: str | None = None
    ) -> None:
        """Answer with an error if none was begun, and close."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        dialect = dialect_of(path or (UNREAD if self.is_waiting else self.scope["path"]))
        code = status or dialect.status(error)
        body = msgspec.json.encode(dialect.error_body(error, ""))
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **errors.headers(error),
        }
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        for event in (
            h11.Response(status_code=code, headers=headers, reason=STATUS_PHRASES[code]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
