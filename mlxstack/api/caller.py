"""Caller of a request: agent, session, program, and rights of its key."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.api.guards import Connection, check_agent, key_of, priority_of, request_id
from mlxstack.core.errors import BadRequest
from mlxstack.core.request import Caller, Priority

BATCH = "/v1/batch/"
"""Beginning of the paths of low priority."""

# An agent id is a path segment, and clients remove `.` and `..` from paths.
AGENT_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]{1,128}")
AGENT_WORDS = "must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, and not . or .."

MAX_CHARS = 200
"""Characters of a program's name and of a session hint."""
CODEX = ("thread-id", "session-id")
OPENCODE = ("x-session-id", "x-session-affinity")
MARKS = ("user-agent", "x-claude-code-agent-id", "x-openai-subagent", "x-parent-session-id")
"""Headers by which clients mark their turns."""
SESSION_MARK = "_session_"
"""Separator of the session in Claude Code's older form of `user_id`."""


class CallerFields(Struct, kw_only=True):
    """Fields of a body that name its sender."""

    session_id: str | None = None
    agent: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: Any = None
    user: Any = None
    metadata: Any = None


def caller_of(body: CallerFields, connection: Connection) -> Caller:
    """Caller of a body.

    Raises BadRequest for an agent id of another form, Forbidden for an agent that the key does not
    name.
    """
    agent = _agent(body)
    if agent is not None:
        check_agent(connection, agent)
    priority = priority_of(key_of(connection))
    if connection.scope["path"].startswith(BATCH):
        priority = Priority.LOW
    return Caller(
        agent=agent,
        priority=priority,
        request_id=request_id(connection.scope),
        session_hint=session_hint(connection.headers, body.prompt_cache_key, _user(body)),
        client=client_name(connection.headers),
        version=client_version(connection.headers),
        salt=salt_of(connection, body.cache_salt or ""),
        marks=_marks(connection.headers),
    )


def _marks(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    values = ((name, _stripped(headers.get(name))[:MAX_CHARS]) for name in MARKS)
    return tuple((name, value) for name, value in values if value)


def _agent(body: CallerFields) -> str | None:
    if body.session_id is not None:
        return checked_agent(body.session_id, "session_id")
    if body.agent is not None:
        return checked_agent(body.agent, "agent")
    return None


def checked_agent(agent: str, param: str) -> str:
    """Validate an agent id. Raises BadRequest."""
    if not AGENT_ID.fullmatch(agent):
        raise BadRequest(f"{param} {AGENT_WORDS}", param)
    return agent


def salt_of(connection: Connection, cache_salt: str = "") -> str:
    """Salt of a request's KV: the key's and its own combined."""
    salt = key_of(connection).salt
    if salt or cache_salt:
        return msgspec.json.encode((salt, cache_salt)).decode()
    return ""


def client_name(headers: Mapping[str, str]) -> str:
    """Product in the User-Agent, without its version; "" without one."""
    return _stripped(headers.get("user-agent")).partition("/")[0][:MAX_CHARS]


def client_version(headers: Mapping[str, str]) -> str:
    """Version of the product in the User-Agent; "" without one."""
    product = _stripped(headers.get("user-agent")).partition(" ")[0]
    return product.partition("/")[2][:MAX_CHARS]


def reader_of(connection: Connection) -> Caller:
    """Caller of a request without a body."""
    headers = connection.headers
    name = client_name(headers)
    return Caller(client=name, version=client_version(headers), salt=salt_of(connection))


def session_hint(headers: Mapping[str, str], cache_key: Any = None, user: Any = None) -> str | None:
    """Strongest session hint of a request as "client:name", or None.

    `cache_key` is OpenAI's `prompt_cache_key`; `user` is its `user`, or Anthropic's
    `metadata.user_id`. Sub-agents of Claude Code share their session's id, so the sub-agent's id is
    added to it.
    """
    if session := _stripped(headers.get("x-claude-code-session-id")):
        agent = _stripped(headers.get("x-claude-code-agent-id"))
        return _hint("claude", "/".join(filter(None, (session, agent))))
    if thread := _first_header(headers, CODEX):
        return _hint("codex", thread)
    if session := _first_header(headers, OPENCODE):
        return _hint("opencode", session)
    if key := _stripped(cache_key):
        return _hint("key", key)
    return _hint_of_user(_stripped(user))


def _user(body: CallerFields) -> Any:
    """End user by OpenAI's field, or by Anthropic's."""
    user_id = None
    if isinstance(body.metadata, dict):
        user_id = body.metadata.get("user_id")
    if user_id is None:
        return body.user
    return user_id


def _hint_of_user(user: str) -> str | None:
    """Session in a Claude Code user id, as JSON or suffix."""
    if not user:
        return None
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        parsed = None
    session = ""
    if isinstance(parsed, dict):
        session = _stripped(parsed.get("session_id"))
    session = session or user.partition(SESSION_MARK)[2]
    if session:
        return _hint("claude", session)
    return _hint("user", user)


def _first_header(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(filter(None, (_stripped(headers.get(name)) for name in names)), "")


def _stripped(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _hint(client: str, name: str) -> str:
    return f"{client}:{name}"[:MAX_CHARS]
