"""Rules for Host and Origin, and CORS for the pages they allow."""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from litestar.constants import DEFAULT_ALLOWED_CORS_HEADERS
from litestar.datastructures import Headers
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard, HTTPScope

from mlxstack.api.asgi import App, Message, Receive, Scope, Send
from mlxstack.api.guards import Connection, name_response, request_id
from mlxstack.api.protocols import dialect_of
from mlxstack.api.response_headers import CACHE_HEADERS
from mlxstack.core.errors import Forbidden
from mlxstack.core.preset import ServerSpec

LOOPBACK = r"localhost|[a-z0-9-]+\.localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1\]"
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""Container host names of Docker and Podman; `.internal` is no TLD."""
APP_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})

HostRules = Callable[[Mapping[str, str], str | None], None]
"""Checks the headers of a request from a peer."""

METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
MAX_AGE_S = 600
"""Seconds for which a browser keeps the answer to a preflight."""
EXPOSED = ", ".join(
    sorted((*CACHE_HEADERS, "request-id", "retry-after", "x-request-id", "x-should-retry"))
)
"""Headers of answers that scripts may read."""
PREFIX = b"access-control-"


def host_rules(server: ServerSpec) -> HostRules:
    """Refuse requests that a web page forged (DNS rebinding, CSRF).

    A Host may be a loopback name, any IP literal (a rebound page never has one), a configured name,
    or, for peers in private networks, a name of this machine that no domain registry can give away:
    see `_machine_names`. An Origin must be loopback, the Host itself, configured, or an app's; a
    name of this machine is not enough, since DNS or mDNS of a hostile network could give it to a
    page. The check raises Forbidden.
    """
    allowed = re.compile(host_pattern(server), re.IGNORECASE)
    machine_names = _machine_names(socket.gethostname())

    def check(headers: Mapping[str, str], peer: str | None) -> None:
        host = _bare(headers.get("host", "localhost"))
        if host.lower() in machine_names and not allowed.fullmatch(host) and _is_near(peer):
            # No Origin equals it.
            host = ""
        elif not (allowed.fullmatch(host) or _is_address(host)):
            raise Forbidden(
                f"host {host!r} is not served here; add it to server.allowed_hosts of the preset"
            )
        origin = headers.get("origin")
        if origin is not None and not _is_friend(origin, host, allowed):
            raise Forbidden(
                f"origin {origin!r} is not allowed; "
                "add its host to server.allowed_hosts of the preset"
            )

    return check


def host_pattern(server: ServerSpec) -> str:
    """Regular expression for loopback and configured names."""
    if "*" in server.allowed_hosts:
        return ".*"
    return "|".join((LOOPBACK, *(re.escape(name) for name in server.allowed_hosts)))


def _machine_names(hostname: str) -> frozenset[str]:
    """Names of this machine: for containers, and in multicast DNS."""
    own = hostname.partition(".")[0].lower()
    return CONTAINER_HOSTS | ({f"{own}.local"} if own else set())


def _is_near(peer: str | None) -> bool:
    """True for a peer on this machine or in a private network."""
    if peer is None:
        return True
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_private


def _bare(host: str) -> str:
    """Host name without its port."""
    return re.sub(r":\d*$", "", host)


def _is_address(host: str) -> bool:
    """True for an IP address without a zone.

    Python takes any text after `%`.
    """
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return "%" not in host


def _is_friend(origin: str, host: str, allowed: re.Pattern[str]) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme in APP_SCHEMES:
        return True
    name = _bare(parts.netloc)
    return bool(name) and (name == host or allowed.fullmatch(name) is not None)


def host_check(server: ServerSpec) -> Callable[[Connection], None]:
    """`host_rules` for a connection of Litestar."""
    check = host_rules(server)
    return lambda connection: check(
        connection.headers, connection.client.host if connection.client else None
    )


def host_guard(server: ServerSpec) -> Guard:
    """`host_check` for every route."""
    check = host_check(server)

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        check(connection)

    return guard


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
