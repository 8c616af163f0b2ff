"""Response bodies of chat completions, whole and in chunks."""

from msgspec import UNSET, Struct, UnsetType

from mlxstack import __version__
from mlxstack.api.response_fields import Logprobs, OpenAIUsage, Timings
from mlxstack.core.response_parts import PrefillProgressed

FINGERPRINT = f"mlx-stack-{__version__}"


class PromptProgress(Struct, frozen=True):
    """Progress of the prompt, as llama-server sends it."""

    total: int
    cache: int
    processed: int
    time_ms: int


def prompt_progress(part: PrefillProgressed) -> PromptProgress:
    """Progress of a prompt under way."""
    return PromptProgress(part.n_prompt, part.n_cached, part.n_done, part.elapsed_ms)


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


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCall, ...] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatMessage(Delta, frozen=True):
    """Whole message."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None


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


class CompletionHead(Struct, frozen=True, kw_only=True, rename={"verbose": "__verbose"}):
    """Fields that a chat completion and its chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT


class ChatCompletion(CompletionHead, frozen=True, kw_only=True):
    """Response to a request that does not stream."""

    choices: tuple[ChatChoice, ...]
    usage: OpenAIUsage
    timings: Timings
    object: str = "chat.completion"
    verbose: Verbose | UnsetType = UNSET


class Chunk(CompletionHead, frozen=True, kw_only=True):
    """Chunk of a stream, whose last one has the usage on request."""

    choices: tuple[ChunkChoice, ...]
    object: str = "chat.completion.chunk"
    usage: OpenAIUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    verbose: Verbose | UnsetType = UNSET


class InputTokens(Struct, frozen=True):
    """Number of prompt tokens of a body."""

    input_tokens: int
    object: str = "response.input_tokens"
