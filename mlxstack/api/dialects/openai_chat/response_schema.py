"""Response bodies of chat completions, whole and in chunks."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mlxstack import __version__
from mlxstack.api.errors import INVALID, ErrorTable, context_sizes, nearest
from mlxstack.api.response_fields import Logprobs, OpenAIUsage, Timings
from mlxstack.core import errors

FINGERPRINT = f"mlx-stack-{__version__}"

# `type` and `code` of an error.
ERROR_TYPES: ErrorTable[tuple[str, str | None]] = {
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


class PromptProgress(Struct, frozen=True):
    """Progress of the prompt, as llama-server sends it."""

    total: int
    cache: int
    processed: int
    time_ms: int


class FunctionCall(Struct, frozen=True):
    """Function of a call; `name` only in its first delta."""

    arguments: str
    name: str | UnsetType = UNSET


class CustomCall(Struct, frozen=True):
    """Custom tool of a call; `name` only in its first delta."""

    input: str
    name: str | UnsetType = UNSET


class ChatToolCall(Struct, frozen=True):
    """Tool call or its delta, of a function or a custom tool; `index` only in deltas.

    `id` and `type` are in the first one.
    """

    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCall, ...] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCall, ...] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    message: ChatMessage
    finish_reason: str
    index: int = 0
    logprobs: Logprobs | None = None


class ChunkChoice(Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: Logprobs | None = None


class Verbose(Struct, frozen=True):
    """Rendered prompt of a request with `verbose: true`."""

    prompt: str
    tokens_evaluated: int


class ChatCompletion(Struct, frozen=True, rename={"verbose": "__verbose"}):
    """Response to a request that does not stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: OpenAIUsage
    timings: Timings
    object: str = "chat.completion"
    verbose: Verbose | UnsetType = UNSET


class Chunk(Struct, frozen=True, rename={"verbose": "__verbose"}):
    """Chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    object: str = "chat.completion.chunk"
    usage: OpenAIUsage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    verbose: Verbose | UnsetType = UNSET


class InputTokens(Struct, frozen=True):
    """Number of prompt tokens of a body."""

    input_tokens: int
    object: str = "response.input_tokens"


def error_body(error: errors.StackError, _: str) -> dict[str, Any]:
    """Error envelope, of a response as of an event inside a stream."""
    kind, code = nearest(ERROR_TYPES, error)
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


def bare_error_body(error: errors.StackError, request: str) -> dict[str, Any]:
    """Error envelope with llama-server's type of a too long prompt."""
    body = error_body(error, request)
    if isinstance(error, errors.TooLong):
        body["error"]["type"] = "exceed_context_size_error"
    return body
