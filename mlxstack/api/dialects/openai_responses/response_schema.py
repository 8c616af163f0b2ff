"""The shapes of a response and of its items."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.logprobs import SampledLogprob
from mlxstack.api.usage import CachedTokens, ReasoningTokens, Timings
from mlxstack.core.engine_events import RequestTimings
from mlxstack.service.response_parts import GenerationFinished

Status = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(CachedTokens, frozen=True):
    """How much of the input came from the caches; writing to them costs nothing here."""

    cache_write_tokens: int = 0


class ResponsesUsage(Struct, frozen=True):
    """Token counts, in the names of this dialect."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class OutputText(Struct, frozen=True, tag="output_text"):
    """Words of a message."""

    text: str
    annotations: tuple[str, ...] = ()
    logprobs: tuple[SampledLogprob, ...] = ()


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Thoughts in plain text."""

    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    """What the assistant said."""

    id: str
    status: Status
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """What the assistant thought; there is no summary beside the thoughts themselves."""

    id: str
    status: Status
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[str, ...] = ()
    encrypted_content: str | None = None


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    """A call of a function. `call_id` comes back with its output (R-1)."""

    id: str
    call_id: str
    name: str
    status: Status
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, frozen=True, tag="custom_tool_call"):
    """A call whose argument is free text."""

    id: str
    call_id: str
    name: str
    status: Status
    input: str = ""
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class IncompleteDetails(Struct, frozen=True):
    """Why a response ended early."""

    reason: str = "max_output_tokens"


class Failure(Struct, frozen=True):
    """Why a response could not be finished."""

    code: str
    message: str


class Response(Struct, frozen=True, kw_only=True):
    """A response, whole or under way; much of it repeats what the request said."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    model: str
    output: tuple[OutputItem, ...] = ()
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponsesUsage | None = None
    instructions: str | list[dict[str, Any]] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    temperature: float
    top_p: float
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    reasoning: dict[str, Any]
    text: dict[str, Any]
    metadata: dict[str, Any]
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    truncation: str = "disabled"
    background: bool = False
    store: bool = False
    timings: Timings | UnsetType = UNSET


def usage(ended: GenerationFinished) -> ResponsesUsage:
    """What one response cost."""
    work: RequestTimings = ended.work
    return ResponsesUsage(
        input_tokens=work.n_prompt,
        input_tokens_details=InputTokensDetails(work.n_cached),
        output_tokens=work.n_generated,
        output_tokens_details=ReasoningTokens(ended.n_reasoning),
        total_tokens=work.n_prompt + work.n_generated,
    )
