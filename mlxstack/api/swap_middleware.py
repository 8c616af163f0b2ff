"""Swap gate middleware: requests wait, with heartbeats, while the model is changed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from litestar.connection import ASGIConnection
from litestar.types import HTTPScope
from msgspec import Struct

from mlxstack.api import errors, guards
from mlxstack.api.guards import name_response, request_id
from mlxstack.api.json_body import decode_body
from mlxstack.api.protocols import dialect_of
from mlxstack.api.streaming import BEAT_S, FIRST_S, HEADERS, cancel, until_disconnect
from mlxstack.core.errors import Busy, Forbidden, StackError, TooLarge, Unauthorized

if TYPE_CHECKING:
    from mlxstack.service.service import Service

# ASGI types.
Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHANGES = "/v1/models/load"
# These read facts of the model, which are known while it is unloaded or changed, or unload it.
READING = frozenset({"/api/show", "/api/pull", "/v1/models/unload"})
METHODS = frozenset({"POST", "DELETE"})


class StreamField(Struct):
    """The field of a body that asks for a stream."""

    stream: Any = None


def swap_gate_middleware(service: "Service", app: Any) -> App:
    """Gate all requests that change or generate during a model swap.

    Before a closed gate wait only requests with a key, no more than `queue.max_waiting`, and no
    body over the limit. Requests without an answer when the gate is interrupted get the reason as
    theirs.
    """
    waiting: set[WaitingRequest] = set()
    server = service.preset.server
    check_host, check_key = guards.host_check(server), guards.key_check(server, dialect_of)

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await app(scope, receive, send)
            return
        response = RelayedResponse(send)
        try:
            async with service.gate.interruptible():
                await enter(scope, receive, response)
        except StackError as error:
            if not response.is_begun:
                await refuse(scope, response.relay, error)

    async def enter(scope: Scope, receive: Receive, response: RelayedResponse) -> None:
        if scope["path"].rstrip("/") in {CHANGES, *READING}:
            await app(scope, receive, response.send)
            return
        if not service.gate.is_closed:
            await service.gate.enter()
            try:
                await app(scope, receive, response.send)
            finally:
                service.gate.leave()
            return
        try:
            connection: guards.Connection = ASGIConnection(cast(HTTPScope, scope))
            check_host(connection)
            check_key(connection.headers, scope["path"])
            _check_room(len(waiting), service.preset.queue.max_waiting)
            held = WaitingRequest(service.preset.server.max_body_bytes, scope, receive, response)
            await held.wait(service.gate, app, waiting)
        except (Busy, Forbidden, TooLarge, Unauthorized) as error:
            await refuse(scope, response.relay, error)

    return handle


class Gate(Protocol):
    """Gate that holds requests back."""

    async def enter(self) -> None:
        """Wait until it is open, and count the request as inside."""

    def leave(self) -> None:
        """Count the request as over."""


class RelayedResponse:
    """Response of the application to one request, and where it goes."""

    def __init__(self, send: Send) -> None:
        self.is_begun = False
        self.media_type = ""
        self.relay = send

    async def send(self, message: Message) -> None:
        """Pass a message of the application on."""
        if not self.is_begun:
            self.is_begun = True
            headers = dict(message.get("headers", ()))
            self.media_type = headers.get(b"content-type", b"").decode("latin-1")
        await self.relay(message)


def _check_room(n_waiting: int, limit: int) -> None:
    # One that loads an unloaded model has to wait in any case.
    if n_waiting >= max(limit, 1):
        raise Busy(f"{n_waiting} requests wait for the change of models, no more are queued")


class WaitingRequest:
    """Request that came while the gate was closed."""

    def __init__(
        self, max_bytes: int, scope: Scope, receive: Receive, response: RelayedResponse
    ) -> None:
        self._max_bytes = max_bytes
        self._scope = scope
        self._dialect = dialect_of(scope["path"])
        self._receive = receive
        self._send = response.relay
        self._response = response
        response.relay = self._pass_on
        self._messages: list[Message] = []
        self._is_read = self._is_stream = self._is_begun = False
        self._failed: Message | None = None
        self._failure = b""

    async def wait(self, gate: Gate, app: App, waiting: "set[WaitingRequest]") -> None:
        """Wait in `waiting` until the gate opens or the client leaves."""
        waiting.add(self)
        try:
            if not self._is_read:
                await self.read_body()
            is_default = self._scope["path"] in self._dialect.streaming_paths
            self._is_stream = _wants_stream(self._body(), is_default)
            await self._pass(gate, app, waiting)
        finally:
            waiting.discard(self)

    async def _pass(self, gate: Gate, app: App, waiting: "set[WaitingRequest]") -> None:
        entering = asyncio.create_task(gate.enter())
        leaving = asyncio.create_task(self._left())
        try:
            patience_s = FIRST_S
            while not (entering.done() or leaving.done()):
                await asyncio.wait(
                    {entering, leaving}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not (entering.done() or leaving.done()) and self._is_stream:
                    await self._send_heartbeat()
                patience_s = BEAT_S if self._is_begun else FIRST_S
            await cancel(leaving)
            if entering.done():
                entering.result()
                waiting.discard(self)
                await app(self._scope, self._replay, self._response.send)
        finally:
            await cancel(leaving)
            await cancel(entering)
            if not entering.cancelled() and entering.exception() is None:
                gate.leave()

    async def read_body(self) -> bytes:
        """Read the whole body, to replay it to the application. Raises TooLarge."""
        self._is_read, n_bytes = True, 0
        while not self._messages or self._messages[-1].get("more_body"):
            message = await self._receive()
            self._messages.append(message)
            if message["type"] == "http.disconnect":
                break
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_bytes:
                raise TooLarge(errors.TOO_LARGE)
        return self._body()

    def _body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)

    async def _left(self) -> None:
        self._messages.append(await until_disconnect(self._receive))

    async def _replay(self) -> Message:
        return self._messages.pop(0) if self._messages else await self._receive()

    async def _send_heartbeat(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            fields = {"content-type": f"{self._dialect.stream_type}; charset=utf-8", **HEADERS}
            headers = [(name.encode(), value.encode()) for name, value in fields.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(
            {"type": "http.response.body", "body": self._dialect.heartbeat, "more_body": True}
        )

    async def _pass_on(self, message: Message) -> None:
        """Forward a message of the application, the head only once."""
        if not self._is_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failed = message if message["status"] != 200 else None
        elif self._failed is None:
            await self._send(message)
        else:
            await self._complain(message)

    async def _complain(self, message: Message) -> None:
        """Send a refusal after the head as a frame."""
        self._failure += bytes(message.get("body", b""))
        if not message.get("more_body"):
            data = self._dialect.error_frame(self._failure)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _wants_stream(body: bytes, is_default: bool) -> bool:
    try:
        stream = decode_body(body, StreamField).stream
        return is_default if stream is None else stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def refuse(scope: Any, send: Send, error: StackError) -> None:
    """Answer with an error in the dialect of the path."""
    dialect = dialect_of(scope["path"])
    fields = {"content-type": "application/json", **errors.headers(error)}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    status = dialect.status(error)
    start: Any = {"type": "http.response.start", "status": status, "headers": headers}
    await name_response(start, scope)
    await send(start)
    body = msgspec.json.encode(dialect.error_body(error, request_id(scope)))
    await send({"type": "http.response.body", "body": body, "more_body": False})
