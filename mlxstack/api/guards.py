"""API keys and their scopes, checked by guards.

Guards are coroutines because Litestar sends plain functions through a thread, each time.
"""

import uuid
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
    """Raise Forbidden for a model that the key does not name."""
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
