"""Response bodies and output items of the Responses API."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.response_fields import (
    Loops,
    PromptTokensDetails,
    ReasoningTokens,
    SampledLogprob,
    Timings,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(PromptTokensDetails, frozen=True):
    """Input tokens that came from the cache; writing to it is free."""

    cache_write_tokens: int = 0


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    loops: Loops = UNSET


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: tuple[str, ...] = ()
    logprobs: tuple[SampledLogprob, ...] = ()


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text"):
    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    id: str
    status: Status
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """Reasoning of the assistant; its summary, on request, is the whole of it."""

    id: str
    status: Status
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[SummaryText, ...] = ()
    encrypted_content: str | None = None


class CallItem(Struct, frozen=True):
    """Call of a tool. Its `call_id` comes back with the output."""

    id: str
    call_id: str
    name: str
    status: Status


class FunctionCallItem(CallItem, frozen=True, tag="function_call"):
    """Function call, whose arguments are JSON."""

    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCallItem(CallItem, frozen=True, tag="custom_tool_call"):
    """Call of a custom tool, whose argument is free text."""

    input: str = ""
    namespace: str | UnsetType = UNSET


class SearchCallItem(Struct, frozen=True, tag="tool_search_call"):
    """Call of the client's search among its tools."""

    id: str
    call_id: str
    status: Status
    arguments: dict[str, Any]
    execution: str = "client"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | SearchCallItem


class IncompleteDetails(Struct, frozen=True):
    reason: str = "max_output_tokens"


class Failure(Struct, frozen=True):
    code: str
    message: str


class Response(Struct, frozen=True, kw_only=True):
    """Response, whole or under way; many fields repeat the request.

    It has all fields that the Open Responses specification requires.
    """

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any]
    text: dict[str, Any]
    metadata: dict[str, Any]
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    previous_response_id: str | None = None
    truncation: str = "disabled"
    background: bool = False
    store: bool = False
    timings: Timings | UnsetType = UNSET
