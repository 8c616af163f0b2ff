"""Swap gate middleware: requests wait, with heartbeats, while the model is changed."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from litestar.connection import ASGIConnection
from litestar.types import HTTPScope
from msgspec import Struct

from mlxstack.api import errors, guards
from mlxstack.api.asgi import App, Message, Receive, Scope, Send
from mlxstack.api.disconnect import ClientDisconnected, cancel, until_disconnect
from mlxstack.api.guards import name_response, request_id
from mlxstack.api.host_rules import host_check
from mlxstack.api.protocols import ANTHROPIC, dialect_of
from mlxstack.api.request_body import BodyBudget, RequestBody, decode_body
from mlxstack.api.streaming import BEAT_S, BLANK, EARLY_S, FIRST_S, HEADERS
from mlxstack.core.errors import Busy, NoThreads, StackError

if TYPE_CHECKING:
    from mlxstack.service.service import Service

CHANGES = "/v1/models/load"
# These read facts of the model, which are known while it is unloaded or changed, or unload it.
READING = frozenset({"/api/show", "/api/pull", "/page/markdown", "/v1/models/unload"})
METHODS = frozenset({"POST", "DELETE"})
ANSWERING = frozenset({
    "chat", "completion", "completions", "embed", "embedding", "embeddings", "generate", "infill",
    "messages", "responses",
})  # fmt: skip
"""Last segments of paths whose answers take the time of a model, and are JSON."""


class EarlyFields(Struct):
    """Fields of a body that count while it waits."""

    stream: Any = None
    thread: Any = None


def swap_gate_middleware(service: "Service", app: Any) -> App:
    """Gate all requests that change or generate during a model swap.

    Before a closed gate wait only requests with a key, no more than `queue.max_waiting`, and no
    body over the limit. Requests without an answer when the gate is interrupted get the reason as
    theirs.
    """
    waiting: set[RelayedResponse] = set()
    server = service.preset.server
    budget = BodyBudget(max(server.max_bodies_bytes, server.max_body_bytes))
    check_host = host_check(server)
    check_key = guards.key_check(server)

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await app(scope, receive, send)
            return
        response = RelayedResponse(scope, send)
        body = RequestBody(scope, receive, service.preset.server.max_body_bytes, budget)
        try:
            async with service.gate.interruptible():
                await enter(scope, body, response)
        except StackError as error:
            if response.is_blank:
                await response.fail(error)
        except ClientDisconnected:
            pass
        finally:
            body.close()

    async def enter(scope: Scope, body: RequestBody, response: RelayedResponse) -> None:
        if scope["path"] in {CHANGES, *READING}:
            await app(scope, body.receive, response.send)
            return
        if not service.gate.is_closed:
            await service.gate.enter()
            try:
                await app(scope, body.receive, response.send)
            finally:
                service.gate.leave()
            return
        connection: guards.Connection = ASGIConnection(cast(HTTPScope, scope))
        check_host(connection)
        check_key(connection.headers, scope["path"])
        # One that loads an unloaded model has to wait in any case.
        if len(waiting) >= max(service.preset.queue.max_waiting, 1):
            raise Busy(f"{len(waiting)} requests wait for the change of models, no more are queued")
        await pass_gate(service.gate, app, scope, body, response, waiting)

    return handle


class Gate(Protocol):
    """Gate that holds requests back."""

    async def enter(self) -> None:
        """Wait until it is open, and count the request as inside."""

    def leave(self) -> None:
        """Count the request as over."""


class EarlyHead(Struct, frozen=True):
    """Early head of a response, sent `after_s` seconds after the request."""

    media_type: str
    heartbeat: bytes
    after_s: float
    is_stream: bool


def early_head(path: str, body: bytes) -> EarlyHead | None:
    """Early head of a stream or JSON response, else None.

    White space may stand before JSON (RFC 8259, 2). Raises NoThreads, since clients go on without a
    thread only after a response of status 400.
    """
    dialect = dialect_of(path)
    fields = _early_fields(body)
    if dialect is ANTHROPIC and fields is not None and fields.thread is not None:
        raise NoThreads
    if fields is not None and _wants_stream(fields, path in dialect.streaming_paths):
        media_type = f"{dialect.stream_type}; charset=utf-8"
        return EarlyHead(media_type, dialect.heartbeat, FIRST_S, is_stream=True)
    if path.rpartition("/")[2] in ANSWERING:
        return EarlyHead("application/json", BLANK, EARLY_S, is_stream=False)
    return None


class RelayedResponse:
    """Response to one request, after heartbeats where it waits."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.is_begun = False
        self.is_blank = True
        self.media_type = ""
        self._scope = scope
        self._send = send
        self._early: EarlyHead | None = None
        self._failure: bytes | None = None

    async def send(self, message: Message) -> None:
        """Pass a message of the application on."""
        if not self.is_begun:
            self.is_begun = True
            self._note_head(dict(message.get("headers", ())))
        elif self.is_blank and bytes(message.get("body", b"")).strip():
            self.is_blank = False
        await self.relay(message)

    async def heartbeat(self, early: EarlyHead) -> None:
        """Keep the connection open, the first time by an early head."""
        if self._early is None:
            self._early = early
            self._scope.setdefault("state", {})["early_type"] = early.media_type
            await self._send(await self._head(200, {"content-type": early.media_type, **HEADERS}))
        await self._send({"type": "http.response.body", "body": early.heartbeat, "more_body": True})

    async def relay(self, message: Message) -> None:
        """Send a message; after an early head errors become frames or bodies."""
        if self._early is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failure = b"" if message["status"] != 200 else None
        elif self._failure is None:
            await self._send(message)
        else:
            self._failure += bytes(message.get("body", b""))
            if not message.get("more_body"):
                frame = dialect_of(self._scope["path"]).error_frame
                data = frame(self._failure) if self._early.is_stream else self._failure
                await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: StackError) -> None:
        """End with an error in the dialect of the path.

        A JSON answer of which a part was sent stays as it is.
        """
        dialect = dialect_of(self._scope["path"])
        data = msgspec.json.encode(dialect.error_body(error, request_id(cast(Any, self._scope))))
        if not self.is_begun:
            fields = {"content-type": "application/json", **errors.headers(error)}
            await self.relay(await self._head(dialect.status(error), fields))
        elif self.media_type.startswith(dialect.stream_type):
            data = dialect.error_frame(data)
        elif not self.is_blank:
            return
        await self.relay({"type": "http.response.body", "body": data, "more_body": False})

    async def _head(self, status: int, fields: dict[str, str]) -> Message:
        """Head of a response that the application has not begun."""
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        start: Any = {"type": "http.response.start", "status": status, "headers": headers}
        await name_response(start, cast(Any, self._scope))
        return cast(Message, start)

    def _note_head(self, headers: dict[bytes, bytes]) -> None:
        """Note the type of the response, also for the connection."""
        self.media_type = headers.get(b"content-type", b"").decode("latin-1")
        is_answer = self._scope["path"].rpartition("/")[2] in ANSWERING
        if is_answer and b"content-length" not in headers:
            self._scope.setdefault("state", {})["early_type"] = self.media_type


async def pass_gate(
    gate: Gate,
    app: App,
    scope: Scope,
    body: RequestBody,
    response: RelayedResponse,
    waiting: set[RelayedResponse],
) -> None:
    """Answer a request that comes while the gate is closed.

    Its response is in `waiting` until the gate opens, or its client leaves.
    """
    waiting.add(response)
    try:
        early = early_head(scope["path"], await body.read())
        entering = asyncio.create_task(gate.enter())
        leaving = asyncio.create_task(until_disconnect(body.connection_receive))
        try:
            patience_s = early.after_s if early is not None else None
            while not (entering.done() or leaving.done()):
                await asyncio.wait(
                    {entering, leaving}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if early is not None and not (entering.done() or leaving.done()):
                    await response.heartbeat(early)
                    patience_s = BEAT_S
            if leaving.done():
                return
            await cancel(leaving)
            entering.result()
            waiting.discard(response)
            await app(scope, body.receive, response.send)
        finally:
            await cancel(leaving)
            await cancel(entering)
            if not entering.cancelled() and entering.exception() is None:
                gate.leave()
    finally:
        waiting.discard(response)


def _early_fields(body: bytes) -> EarlyFields | None:
    """Fields of a body; None where it cannot be read."""
    try:
        return decode_body(body, EarlyFields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _wants_stream(fields: EarlyFields, is_default: bool) -> bool:
    if fields.stream is None:
        return is_default
    return fields.stream is True
