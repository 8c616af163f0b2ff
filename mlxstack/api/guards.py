"""Access control: rules for Host and Origin, API keys and their scopes.

Guards are coroutines because Litestar sends plain functions through a thread, each time.
"""

import ipaddress
import re
import socket
import uuid
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.datastructures import MutableScopeHeaders
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard, Message, Scope

from mlxstack.api.api_keys import as_key, fits
from mlxstack.api.protocols import Dialect, dialect_of
from mlxstack.core.errors import Forbidden, Unauthorized
from mlxstack.core.preset import ApiKey, ServerSpec
from mlxstack.core.request import Priority
from mlxstack.policy.kv.conversation_id import is_implicit

# Route options: open without a key, answering before the model is loaded or while it is unloaded,
# concerning all agents.
UNLOADED = {"is_of_facts": True}
PUBLIC = {"is_public": True, **UNLOADED}
EARLY = {"is_public": True, "is_early": True}
OF_ALL = {"is_of_all": True}

UNBOUND = ApiKey("", may_raise=True)

LOOPBACK = r"localhost|[a-z0-9-]+\.localhost|127(?:\.\d{1,3}){3}|\[::1\]"
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""Container host names of Docker and Podman; `.internal` is no TLD."""
APP_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})

HostRules = Callable[[Mapping[str, str], str | None], None]
"""Checks the headers of a request from a peer."""

Connection = ASGIConnection[Any, Any, Any, Any]


def request_id(scope: Scope) -> str:
    """Request id: `req_` and 32 hex digits, constant during the request."""
    state: dict[str, Any] = scope.setdefault("state", {})
    return str(state.setdefault("request_id", f"req_{uuid.uuid4().hex}"))


# Clients of llama-server look for these names in plain dictionaries.
CASED = b"process-start-"


async def name_response(message: Message, scope: Scope) -> None:
    """Adds `x-request-id` for OpenAI's clients and `request-id` for Anthropic's."""
    if message["type"] == "http.response.start":
        headers = MutableScopeHeaders.from_message(message)
        headers["x-request-id"] = headers["request-id"] = request_id(scope)
        message["headers"] = [
            (name.title() if name.startswith(CASED) else name, value)
            for name, value in message["headers"]
        ]


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


def key_check(server: ServerSpec) -> Callable[[Mapping[str, str], str], ApiKey | None]:
    """Require one of the configured keys, as `Authorization: Bearer` or `x-api-key`.

    The check of headers and path raises Unauthorized, or returns the key; None where none are
    configured.
    """
    api_keys = [as_key(key) for key in server.api_keys]

    def check(headers: Mapping[str, str], path: str) -> ApiKey | None:
        if not api_keys:
            return None
        secret = _key(headers, dialect_of(path))
        if secret is None:
            raise Unauthorized(
                "an API key is needed: send it as `Authorization: Bearer` or `x-api-key`"
            )
        # All keys are compared, so that the time does not tell which one was close.
        fitting = [key for key in api_keys if fits(key, secret)]
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


def key_guard(server: ServerSpec, names: Callable[[], Collection[str]] | None = None) -> Guard:
    """`key_check` for every private route; stores the key in the connection.

    `names` are those of the model that a service serves now.
    """
    check = key_check(server)

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        if handler.opt.get("is_public"):
            return
        key = check(connection.headers, connection.scope["path"])
        if key is not None:
            attach_key(connection, key)
            if names is not None:
                check_model(key, names())
            if handler.opt.get("is_of_all"):
                require_unscoped(key)

    return guard


def _key(headers: Mapping[str, str], dialect: Dialect) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else None
    header = headers.get("x-api-key")
    if dialect.prefers_x_api_key:
        return header or bearer
    return bearer or header


def key_of(connection: Connection) -> ApiKey:
    """Key of a request; one without bounds where none are configured."""
    key: ApiKey = connection.state.get("key") or UNBOUND
    return key


def attach_key(connection: Connection, key: ApiKey) -> None:
    """Attach the key to the connection. Raises Forbidden for others' agents."""
    connection.state.key = key
    agent = connection.path_params.get("agent")
    if isinstance(agent, str):
        _check(key, agent)


def check_agent(connection: Connection, agent: str) -> None:
    """Raises Forbidden for an agent that the key does not name."""
    _check(key_of(connection), agent)


def require_unscoped(key: ApiKey) -> None:
    """Raises Forbidden when the key is only for some agents or models."""
    if key.models:
        raise Forbidden(
            "this path concerns all models, and this API key is only for "
            f"{', '.join(key.models)}; use a key without models (server.api_keys of the preset)"
        )
    if key.agents:
        raise Forbidden(
            "this path concerns all agents, and this API key is limited to agents "
            f"{', '.join(key.agents)}; use a key without agents (server.api_keys of the preset)"
        )


def check_model(key: ApiKey | None, names: Collection[str]) -> None:
    """Raise Forbidden for a model, by all its names, that the key does not name."""
    if key is not None and not is_for(key, names):
        raise Forbidden(
            f"this API key is not for the model {next(iter(names), '')!r}, only for "
            f"{', '.join(key.models)} (server.api_keys of the preset)"
        )


def is_for(key: ApiKey, names: Collection[str]) -> bool:
    """Whether a key is for a model with these names."""
    return not key.models or any(
        fnmatchcase(name, pattern) for name in names for pattern in key.models
    )


def is_unscoped(connection: Connection) -> bool:
    """True for a key of all agents."""
    return not key_of(connection).agents


def can_access(connection: Connection, agent: str) -> bool:
    """True if the key names this agent."""
    return _is_named(key_of(connection), agent)


def check_raise(connection: Connection, priority: Priority | None) -> None:
    """Raise Forbidden when a key would exceed its own priority tier."""
    key = key_of(connection)
    if priority is not None and not key.may_raise and priority < priority_of(key):
        raise Forbidden(
            f"a key of tier {key.tier} cannot give priority {priority.name.lower()}; "
            "use a key of that tier (server.api_keys of the preset)"
        )


def _check(key: ApiKey, agent: str) -> None:
    if not _is_named(key, agent):
        if is_implicit(agent):
            raise Forbidden(
                f"{agent!r} has the form of the names that conversations without one get, and "
                "this API key is only for some agents; use a name of another form"
            )
        raise Forbidden(
            f"this API key may not act as agent {agent!r}; allowed: {', '.join(key.agents)} "
            "(server.api_keys of the preset)"
        )


def _is_named(key: ApiKey, agent: str) -> bool:
    """Match an agent against the key; unnamed conversations match no scoped key."""
    return not key.agents or any(
        fnmatchcase(agent, pattern) and not is_implicit(agent) for pattern in key.agents
    )


def priority_of(key: ApiKey) -> Priority:
    """Priority of the tier of a key."""
    return Priority[key.tier.name]
