"""Who may come in: names of this machine against DNS rebinding, API keys, and a loaded model.

Guards are coroutines because Litestar sends plain functions through a thread, each time.
"""

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from mlxstack.api import api_key_scope
from mlxstack.api.cache_headers import EXPOSED
from mlxstack.api.errors import Dialect, dialect
from mlxstack.core.errors import Forbidden, Unauthorized
from mlxstack.core.preset import ApiKey, ServerSpec
from mlxstack.service.service import Service

# Route options: open without a key, answering before the model is loaded, concerning all agents.
PUBLIC = {"is_public": True}
EARLY = {"is_public": True, "is_early": True}
OF_ALL = {"is_of_all": True}

LOOPBACK = r"localhost|[a-z0-9-]+\.localhost|127(?:\.\d{1,3}){3}|\[::1\]"
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names of Docker and Podman for the machine that runs a container; no registry has `.internal`."""
APP_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})

Connection = ASGIConnection[Any, Any, Any, Any]


def host_check(server: ServerSpec) -> Callable[[Connection], None]:
    """Refuses requests that a web page tricked a browser into sending (DNS rebinding, CSRF).

    A Host may be a loopback name, any IP literal (a rebound page never has one), a configured
    name, or, for peers in private networks, a name of this machine that no domain registry can
    give away: see `_machine_names`. An Origin must be loopback, the Host itself, configured, or
    an app's; a name of this machine is not enough, since DNS or mDNS of a hostile network could
    give it to a page. The check raises Forbidden.
    """
    known = re.compile(_names(server), re.IGNORECASE)
    machine_names = _machine_names(socket.gethostname())

    def check(connection: Connection) -> None:
        host = _bare(connection.headers.get("host", "localhost"))
        if host.lower() in machine_names and not known.fullmatch(host) and _is_near(connection):
            # No Origin equals it.
            host = ""
        elif not (known.fullmatch(host) or _is_address(host)):
            raise Forbidden(
                f"host {host!r} is not served here; add it to server.allowed_hosts of the preset"
            )
        origin = connection.headers.get("origin")
        if origin is not None and not _is_friend(origin, host, known):
            raise Forbidden(
                f"pages of {origin!r} may not use this service; "
                "add its host to server.allowed_hosts of the preset"
            )

    return check


def key_check(server: ServerSpec) -> Callable[[Connection], ApiKey | None]:
    """Wants one of the configured keys, as `Authorization: Bearer` or `x-api-key`.

    The check raises Unauthorized, or gives the key; None where none are configured.
    """
    known = [api_key_scope.as_key(key) for key in server.api_keys]

    def check(connection: Connection) -> ApiKey | None:
        if not known:
            return None
        given = _key(connection)
        if given is None:
            raise Unauthorized(
                "an API key is needed: send it as `Authorization: Bearer` or `x-api-key`"
            )
        # All keys are compared, so that the time does not tell which one was close.
        fitting = [key for key in known if api_key_scope.fits(key, given)]
        if not fitting:
            raise Unauthorized("Invalid API Key")
        return fitting[0]

    return check


def host_guard(server: ServerSpec) -> Guard:
    """`host_check` for every route."""
    check = host_check(server)

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        check(connection)

    return guard


def key_guard(server: ServerSpec) -> Guard:
    """`key_check` for every route that is not public.

    What the key gives its holder is left in the connection's state.
    """
    check = key_check(server)

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        if handler.opt.get("is_public"):
            return
        key = check(connection)
        if key is not None:
            api_key_scope.attach_key(connection, key)
            if handler.opt.get("is_of_all"):
                api_key_scope.require_unscoped(key)

    return guard


def loaded_guard(service: Service) -> Guard:
    """Refuses everything but the early routes until the model is there."""

    async def guard(_: Connection, handler: BaseRouteHandler) -> None:
        if not handler.opt.get("is_early"):
            service.require()

    return guard


def cors(server: ServerSpec) -> CORSConfig:
    """Answers preflights of the origins that the host guard lets in."""
    return CORSConfig(
        allow_origins=[],
        allow_origin_regex=rf"(?i:https?://(?:{_names(server)})(?::\d+)?)",
        allow_headers=["*"],
        expose_headers=list(EXPOSED),
    )


def _names(server: ServerSpec) -> str:
    if "*" in server.allowed_hosts:
        return ".*"
    return "|".join((LOOPBACK, *(re.escape(name) for name in server.allowed_hosts)))


def _machine_names(hostname: str) -> frozenset[str]:
    """Name that containers use for this machine, and its own name in multicast DNS."""
    own = hostname.partition(".")[0].lower()
    return CONTAINER_HOSTS | ({f"{own}.local"} if own else set())


def _is_near(connection: Connection) -> bool:
    """Whether the peer is on this machine, in a container, or in the local network."""
    if connection.client is None:
        return True
    try:
        address = ipaddress.ip_address(connection.client.host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_private


def _bare(host: str) -> str:
    """Without the port."""
    return re.sub(r":\d*$", "", host)


def _is_address(host: str) -> bool:
    """Python takes any text for the zone after a `%`; an address in a URL has none."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return "%" not in host


def _is_friend(origin: str, host: str, known: re.Pattern[str]) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme in APP_SCHEMES:
        return True
    name = _bare(parts.netloc)
    return bool(name) and (name == host or known.fullmatch(name) is not None)


def _key(connection: Connection) -> str | None:
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else None
    header = connection.headers.get("x-api-key")
    if dialect(connection.scope["path"]) is Dialect.ANTHROPIC:
        return header or bearer
    return bearer or header
