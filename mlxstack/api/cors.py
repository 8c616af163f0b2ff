"""CORS: a page that the host rules let in may read answers."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, cast

import msgspec
from litestar.constants import DEFAULT_ALLOWED_CORS_HEADERS
from litestar.datastructures import Headers
from litestar.types import HTTPScope

from mlxstack.api.guards import host_rules, name_response, request_id
from mlxstack.api.protocols import dialect_of
from mlxstack.api.response_headers import CACHE_HEADERS
from mlxstack.api.swap_middleware import App, Message, Receive, Scope, Send
from mlxstack.core.errors import Forbidden
from mlxstack.core.preset import ServerSpec

METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
MAX_AGE_S = 600
"""Seconds for which a browser keeps the answer to a preflight."""
EXPOSED = ", ".join(
    sorted((*CACHE_HEADERS, "request-id", "retry-after", "x-request-id", "x-should-retry"))
)
"""Headers of answers that scripts may read."""
PREFIX = b"access-control-"


def cors_middleware(server: ServerSpec, app: App) -> App:
    """Answer preflights of pages that `host_rules` let in.

    They may read all answers. Litestar's own CORS checks the Origin only, while the rules depend on
    the Host too. Names are in title case, since some clients look for them in plain dictionaries.
    """
    check = host_rules(server)

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers.from_scope(cast(HTTPScope, scope)) if scope["type"] == "http" else None
        if headers is None or "origin" not in headers:
            await app(scope, receive, send)
            return
        origin = headers["origin"].encode("latin-1")
        try:
            check(headers, scope["client"][0] if scope["client"] else None)
        except Forbidden as error:
            if scope["method"] == "OPTIONS":
                dialect = dialect_of(scope["path"])
                body = dialect.error_body(error, request_id(cast(Any, scope)))
                fields = [(b"content-type", b"application/json")]
                await _answer(scope, send, dialect.status(error), fields, msgspec.json.encode(body))
            else:
                # The same rules refuse it there.
                await app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            # Older browsers require 200 rather than 204.
            await _answer(scope, send, HTTPStatus.OK, _preflight_headers(headers, origin))
        else:
            await app(scope, receive, _readable(send, origin))

    return handle


def _readable(send: Send, origin: bytes) -> Send:
    """`send` with headers of CORS, in place of a member's."""

    async def readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            own = [(name, value) for name, value in headers if not name.lower().startswith(PREFIX)]
            added = [*_origin_headers(origin), (b"Access-Control-Expose-Headers", EXPOSED.encode())]
            message = {**message, "headers": [*own, *added]}
        await send(message)

    return readable


def _origin_headers(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"Access-Control-Allow-Origin", origin), (b"Vary", b"Origin")]


def _preflight_headers(headers: Headers, origin: bytes) -> list[tuple[bytes, bytes]]:
    asked = headers.get("access-control-request-headers", "")
    names = {name.strip() for name in asked.split(",")} - {""} | DEFAULT_ALLOWED_CORS_HEADERS
    return [
        *_origin_headers(origin),
        (b"Access-Control-Allow-Methods", METHODS.encode()),
        (b"Access-Control-Allow-Headers", ", ".join(sorted(names)).encode("latin-1")),
        (b"Access-Control-Max-Age", str(MAX_AGE_S).encode()),
        # Chromium sends a preflight before requests to a private network.
        (b"Access-Control-Allow-Private-Network", b"true"),
    ]


async def _answer(
    scope: Scope, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes = b""
) -> None:
    """Send a whole response that has its id."""
    length = (b"content-length", str(len(body)).encode())
    start: Any = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
    await name_response(start, cast(Any, scope))
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
