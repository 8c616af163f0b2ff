"""Response bodies, output items and stream events of the Responses API."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.response_fields import PromptTokens, ReasoningTokens, SampledLogprob, Timings

Status = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(PromptTokens, frozen=True):
    """Input tokens that came from the cache; writing to it is free."""

    cache_write_tokens: int = 0


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


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
    """Response, whole or under way; many fields repeat the request."""

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


class ResponsesEvent(Struct, kw_only=True, tag_field="type"):
    """Stream event; `sequence_number` is set when the event is sent."""

    sequence_number: int = 0


class OfResponse(ResponsesEvent):
    """Event of the whole response."""

    response: Response


class Created(OfResponse, tag="response.created"):
    """First event."""


class InProgress(OfResponse, tag="response.in_progress"):
    """Second event, and the heartbeat."""


class Completed(OfResponse, tag="response.completed"):
    """Last event of a complete response."""


class IncompleteEvent(OfResponse, tag="response.incomplete"):
    """Last event of a response that was cut off."""


class FailedEvent(OfResponse, tag="response.failed"):
    """Last event of a response that failed."""


class ItemAdded(ResponsesEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponsesEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class InItem(ResponsesEvent):
    """Event inside an item."""

    item_id: str
    output_index: int


class InContent(InItem, kw_only=True):
    """Event inside the one content part of an item."""

    content_index: int = 0


class PartAdded(InContent, kw_only=True, tag="response.content_part.added"):
    part: OutputText


class PartDone(InContent, kw_only=True, tag="response.content_part.done"):
    part: OutputText


class OutputTextDelta(InContent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[SampledLogprob, ...] = ()


class TextDone(InContent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[SampledLogprob, ...] = ()


class ReasoningDelta(InContent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InContent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class InSummary(InItem, kw_only=True):
    """Event inside the one part of a summary."""

    summary_index: int = 0


class SummaryAdded(InSummary, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryDelta(InSummary, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(InSummary, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class SummaryDone(InSummary, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    """Piece of the arguments of a call."""

    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(InItem, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(InItem, tag="response.custom_tool_call_input.done"):
    input: str
