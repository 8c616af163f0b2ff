"""The shapes of chat completions, whole and in chunks."""

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxstack import __version__
from mlxstack.api.logprobs import Logprobs
from mlxstack.api.usage import OpenAIUsage, Timings
from mlxstack.service.response_parts import FinishCause, GenerationFinished, ToolCallPart

FINGERPRINT = f"mlx-stack-{__version__}"


class PromptProgress(Struct, frozen=True):
    """llama-server's `prompt_progress`."""

    total: int
    cache: int
    processed: int
    time_ms: int


class FunctionCall(Struct, frozen=True):
    """`name` only in the first delta of a call."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(Struct, frozen=True):
    """A call, or a delta of one; `index` only in deltas, `id` and `type` only in the first."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    """What the assistant said."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCall, ...] | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """What came anew."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCall, ...] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One whole choice."""

    message: ChatMessage
    finish_reason: str
    index: int = 0
    logprobs: Logprobs | None = None


class ChunkChoice(Struct, frozen=True):
    """One choice's news."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: Logprobs | None = None


class ChatCompletion(Struct, frozen=True):
    """The answer to a request that does not stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: OpenAIUsage
    timings: Timings
    object: str = "chat.completion"


class Chunk(Struct, frozen=True):
    """One frame of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    object: str = "chat.completion.chunk"
    usage: OpenAIUsage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


def finish_reason(ended: GenerationFinished, has_calls: bool) -> str:
    """`tool_calls` when any call was made, even if text followed."""
    if has_calls:
        return "tool_calls"
    return "length" if ended.ending in (FinishCause.LENGTH, FinishCause.CONTEXT) else "stop"


def whole_call(called: ToolCallPart) -> ChatToolCall:
    """A call of a whole answer."""
    return ChatToolCall(
        function=FunctionCall(arguments=_json(called), name=called.name),
        id=called.id,
        type="function",
    )


def call_deltas(called: ToolCallPart, index: int) -> tuple[Delta, Delta]:
    """The first names the call, the second brings its arguments."""
    head = ChatToolCall(FunctionCall("", called.name), index=index, id=called.id, type="function")
    rest = ChatToolCall(FunctionCall(_json(called)), index=index)
    return Delta(tool_calls=(head,)), Delta(tool_calls=(rest,))


def _json(called: ToolCallPart) -> str:
    return msgspec.json.encode(called.arguments).decode()
