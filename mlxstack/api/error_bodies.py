"""Error bodies and heartbeats of the dialects."""

from typing import Any

from mlxstack.api.errors import INVALID, STATUSES, ErrorTable, context_sizes, nearest
from mlxstack.core import errors

RESPONSES_HEARTBEAT = b'event: keepalive\ndata: {"type": "keepalive"}\n\n'
"""Codex only counts events, not comments; it ignores those of types that it does not know."""

ANTHROPIC_HEARTBEAT = b'event: ping\ndata: {"type": "ping"}\n\n'

OLLAMA_HEARTBEAT = b" "
"""Whitespace before the next line, since no line may be empty."""

# `type` and `code` of an error.
OPENAI_TYPES: ErrorTable[tuple[str, str | None]] = {
    errors.StackError: ("server_error", None),
    errors.BadRequest: (INVALID, None),
    errors.TooLong: (INVALID, "context_length_exceeded"),
    errors.Unsupported: ("not_supported_error", None),
    errors.Unauthorized: ("authentication_error", "invalid_api_key"),
    errors.Forbidden: ("permission_error", None),
    errors.NotFound: (INVALID, None),
    errors.UnknownModel: (INVALID, "model_not_found"),
    errors.Conflict: (INVALID, "conflict"),
    errors.Busy: ("server_error", "overloaded"),
    errors.DiskFull: ("server_error", "insufficient_storage"),
    errors.Damaged: (INVALID, None),
}

ANTHROPIC_TYPES: ErrorTable[str] = {
    errors.StackError: "api_error",
    errors.BadRequest: INVALID,
    errors.TooLarge: "request_too_large",
    errors.Unauthorized: "authentication_error",
    errors.Forbidden: "permission_error",
    errors.NotFound: "not_found_error",
    errors.Conflict: INVALID,
    errors.Busy: "overloaded_error",
    errors.Damaged: INVALID,
}

LLAMA_TYPES: ErrorTable[str] = {
    errors.StackError: "server_error",
    errors.BadRequest: INVALID,
    errors.TooLong: "exceed_context_size_error",
    errors.Unsupported: "not_supported_error",
    errors.Unauthorized: "authentication_error",
    errors.Forbidden: "permission_error",
    errors.NotFound: "not_found_error",
    errors.Conflict: INVALID,
    errors.Busy: "unavailable_error",
    errors.Loading: "unavailable_error",
    errors.DiskFull: "insufficient_storage_error",
    errors.Damaged: INVALID,
}


def openai_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    kind, code = nearest(OPENAI_TYPES, error)
    message = error.message
    if isinstance(error, errors.TooLong):
        # Clients match this exact text.
        message = (
            f"This model's maximum context length is {error.limit} tokens. "
            f"However, your messages resulted in {error.got} tokens."
        )
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": code,
            **context_sizes(error),
        }
    }


def bare_chat_error(error: errors.StackError, request: str) -> dict[str, Any]:
    """Error envelope with llama-server's type of a too long prompt."""
    body = openai_error(error, request)
    if isinstance(error, errors.TooLong):
        body["error"]["type"] = "exceed_context_size_error"
    return body


def anthropic_error(error: errors.StackError, request: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    message = error.message
    if isinstance(error, errors.TooLong):
        # Clients match this exact text.
        message = f"prompt is too long: {error.got} tokens > {error.limit} maximum"
    inner = {"type": nearest(ANTHROPIC_TYPES, error), "message": message}
    return {"type": "error", "error": inner, "request_id": request}


def llama_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    message = error.message
    if isinstance(error, errors.TooLong):
        # Clients match this exact text.
        message = (
            f"request ({error.got} tokens) exceeds the available context size "
            f"({error.limit} tokens), try increasing it"
        )
    return {
        "error": {
            "code": nearest(STATUSES, error),
            "message": message,
            "type": nearest(LLAMA_TYPES, error),
            **context_sizes(error),
        }
    }


def ollama_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of a line inside a stream."""
    return {"error": error.message}
