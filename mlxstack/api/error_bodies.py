"""Error bodies and heartbeats of the dialects."""

from typing import Any

from msgspec import json

from mlxstack.api import streaming
from mlxstack.api.errors import context_sizes, details, row_of
from mlxstack.core import errors

ANTHROPIC_HEARTBEAT = b'event: ping\ndata: {"type": "ping"}\n\n'

OLLAMA_HEARTBEAT = b" "
"""Whitespace before the next line, since no line may be empty."""


def openai_message(error: errors.StackError) -> str:
    """Message in OpenAI's words."""
    if not isinstance(error, errors.TooLong):
        return error.message
    # Clients match this text.
    return (
        f"This model's maximum context length is {error.limit} tokens. "
        f"However, your {error.param} resulted in {error.got} tokens."
    )


def openai_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    row = row_of(error)
    return {
        "error": {
            "message": openai_message(error),
            "type": row.openai,
            "param": getattr(error, "param", None),
            "code": row.code,
            **context_sizes(error),
        }
    }


def responses_frame(body: bytes) -> bytes:
    """Error event of a stream without any other event."""
    error = json.decode(body)["error"]
    return streaming.frame(
        {**error, "type": "error", "sequence_number": 0, "error": error}, "error"
    )


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
    inner = {"type": row_of(error).anthropic, "message": message, **details(error)}
    return {"type": "error", "error": inner, "request_id": request}


def llama_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    row = row_of(error)
    message = error.message
    if isinstance(error, errors.TooLong):
        # Clients match this exact text.
        message = (
            f"request ({error.got} tokens) exceeds the available context size "
            f"({error.limit} tokens), try increasing it"
        )
    return {
        "error": {"code": row.status, "message": message, "type": row.llama, **context_sizes(error)}
    }


def ollama_error(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of a line inside a stream."""
    message = error.message
    if isinstance(error, errors.TooLong):
        # Clients match these texts: that of embeddings, and that of all else.
        n_over = max(1, error.got - error.limit)
        if error.param == "input":
            phrase = "the input length exceeds the context length"
        else:
            phrase = f"prompt too long; exceeded max context length by {n_over} tokens"
        message = f"{phrase}: {message}"
    return {"error": message}
