"""Gives every request a name that its answer and the log share."""

import uuid
from typing import Any

from litestar.datastructures import MutableScopeHeaders
from litestar.types import Message, Scope


def request_id(scope: Scope) -> str:
    """`req_` and 32 hex digits, the same for the whole life of a request."""
    state: dict[str, Any] = scope.setdefault("state", {})
    return str(state.setdefault("request_id", f"req_{uuid.uuid4().hex}"))


async def name_response(message: Message, scope: Scope) -> None:
    """Adds `x-request-id` for OpenAI's clients and `request-id` for Anthropic's."""
    if message["type"] == "http.response.start":
        found = MutableScopeHeaders.from_message(message)
        found["x-request-id"] = found["request-id"] = request_id(scope)
