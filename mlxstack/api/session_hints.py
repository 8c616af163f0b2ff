"""Finds a client's own name for its conversation: where to look first, never who must wait."""

import json
from collections.abc import Mapping
from typing import Any

MAX_CHARS = 200

CODEX = ("thread-id", "session-id")
OPENCODE = ("x-session-id", "x-session-affinity")

# Claude Code's older form of `user_id` ends so.
SESSION_MARK = "_session_"


def hint(headers: Mapping[str, str], cache_key: Any = None, user: Any = None) -> str | None:
    """The strongest hint of a request: "client:name", or None.

    `cache_key` is OpenAI's `prompt_cache_key`; `user` is its `user`, or Anthropic's
    `metadata.user_id`. Sub-agents of Claude Code share their session's id, so that theirs is
    added to it (0.5 of the wire protocols).
    """
    if session := _said(headers.get("x-claude-code-session-id")):
        agent = _said(headers.get("x-claude-code-agent-id"))
        return _named("claude", f"{session}/{agent}" if agent else session)
    if thread := _first(headers, CODEX):
        return _named("codex", thread)
    if session := _first(headers, OPENCODE):
        return _named("opencode", session)
    if key := _said(cache_key):
        return _named("key", key)
    return _of_user(_said(user))


def _of_user(user: str) -> str | None:
    """Claude Code wraps its session into the user's id, as JSON or as a suffix."""
    if not user:
        return None
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        parsed = None
    inner = _said(parsed.get("session_id")) if isinstance(parsed, dict) else ""
    session = inner or user.partition(SESSION_MARK)[2]
    return _named("claude", session) if session else _named("user", user)


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((said for name in names if (said := _said(headers.get(name)))), "")


def _said(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _named(client: str, name: str) -> str:
    return f"{client}:{name}"[:MAX_CHARS]
