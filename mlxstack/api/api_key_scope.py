"""What the holder of an API key may do: how urgent he is, whose KV he shares, who he speaks as."""

import hashlib
import secrets
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from litestar.connection import ASGIConnection
from msgspec.structs import replace

from mlxstack.api.request_id import request_id
from mlxstack.core.errors import Forbidden
from mlxstack.core.preset import ApiKey
from mlxstack.core.request import Priority
from mlxstack.policy.conversation_id import is_implicit
from mlxstack.service.generation_options import GenerationOptions

DIGEST = "sha256:"
BATCH = "/v1/batch/"

Connection = ASGIConnection[Any, Any, Any, Any]


def as_key(key: str | ApiKey) -> ApiKey:
    """The key with its digest in the place of itself."""
    found = ApiKey(key) if isinstance(key, str) else key
    if found.key.startswith(DIGEST):
        return replace(found, key=found.key.lower())
    return replace(found, key=_digest(found.key))


def fits(key: ApiKey, given: str) -> bool:
    """Whether this is the key, in a time that tells nothing."""
    return secrets.compare_digest(_digest(given), key.key)


def attach_key(connection: Connection, key: ApiKey) -> None:
    """Keep the key with the connection. Raises Forbidden where the path names others' agents."""
    connection.state.key = key
    agent = connection.path_params.get("agent")
    if isinstance(agent, str):
        _check(key, agent)


def apply_key_policy(options: GenerationOptions, connection: Connection) -> GenerationOptions:
    """The options with what endpoint, key and request say; the body has no word in it.

    Raises Forbidden for an agent that the key does not name.
    """
    key: ApiKey = connection.state.get("key") or ApiKey("")
    if options.agent is not None:
        _check(key, options.agent)
    return replace(
        options,
        request=request_id(connection.scope),
        priority=Priority.LOW if connection.scope["path"].startswith(BATCH) else _priority(key),
        salt=salt_of(connection, options.salt),
    )


def salt_of(connection: Connection, own: str = "") -> str:
    """Under which salt the KV of a request lies, with the one that it names itself.

    One salt of both, which no other two make; without any, none.
    """
    key: ApiKey = connection.state.get("key") or ApiKey("")
    return msgspec.json.encode((key.salt, own)).decode() if key.salt or own else ""


def check_agent(connection: Connection, agent: str) -> None:
    """Raises Forbidden for an agent that the key does not name."""
    key: ApiKey | None = connection.state.get("key")
    if key is not None:
        _check(key, agent)


def require_unscoped(key: ApiKey) -> None:
    """Raises Forbidden when the key is only for some agents."""
    if key.agents:
        raise Forbidden(
            "this path concerns all agents, and this API key speaks only as "
            f"{', '.join(key.agents)}; use a key without agents (server.api_keys of the preset)"
        )


def is_unscoped(connection: Connection) -> bool:
    """Whether the key is for all agents."""
    key: ApiKey | None = connection.state.get("key")
    return key is None or not key.agents


def can_access(connection: Connection, agent: str) -> bool:
    """Whether the key names this agent."""
    key: ApiKey | None = connection.state.get("key")
    return key is None or _is_named(key, agent)


def check_raise(connection: Connection, wanted: Priority | None) -> None:
    """Raises Forbidden when a key would make an agent more urgent than its own tier."""
    key: ApiKey | None = connection.state.get("key")
    if key is not None and wanted is not None and wanted < _priority(key):
        raise Forbidden(
            f"a key of tier {key.tier} cannot give priority {wanted.name.lower()}; "
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
            f"this API key may not speak as {agent!r}, only as {', '.join(key.agents)} "
            "(server.api_keys of the preset)"
        )


def _is_named(key: ApiKey, agent: str) -> bool:
    """A conversation without a name may be anybody's, whatever pattern fits the one it got."""
    return not key.agents or any(
        fnmatchcase(agent, pattern) and not is_implicit(agent) for pattern in key.agents
    )


def _priority(key: ApiKey) -> Priority:
    return Priority[key.tier.name]


def _digest(key: str) -> str:
    return DIGEST + hashlib.sha256(key.encode()).hexdigest()
