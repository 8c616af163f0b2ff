"""The shapes of a response and of its items."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from mlxstack.api.response_fields import CachedTokens, ReasoningTokens, SampledLogprob, Timings

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


class ResponsesEvent(Struct, kw_only=True, tag_field="type"):
    """`sequence_number` is given when the event is sent."""

    sequence_number: int = 0


class Created(ResponsesEvent, tag="response.created"):
    """It has begun."""

    response: Response


class InProgress(ResponsesEvent, tag="response.in_progress"):
    """It goes on: the first one, and the heartbeat (X-21)."""

    response: Response


class Completed(ResponsesEvent, tag="response.completed"):
    """It ended well."""

    response: Response


class IncompleteEvent(ResponsesEvent, tag="response.incomplete"):
    """It was cut."""

    response: Response


class FailedEvent(ResponsesEvent, tag="response.failed"):
    """It broke."""

    response: Response


class ItemAdded(ResponsesEvent, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ResponsesEvent, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class InItem(ResponsesEvent):
    """Something inside an item."""

    item_id: str
    output_index: int


class InContent(InItem, kw_only=True):
    """Something inside the one part of an item's content."""

    content_index: int = 0


class PartAdded(InContent, kw_only=True, tag="response.content_part.added"):
    """The text of a message begins."""

    part: OutputText


class PartDone(InContent, kw_only=True, tag="response.content_part.done"):
    """The text of a message is complete."""

    part: OutputText


class OutputTextDelta(InContent, kw_only=True, tag="response.output_text.delta"):
    """New words."""

    delta: str
    logprobs: tuple[SampledLogprob, ...] = ()


class TextDone(InContent, kw_only=True, tag="response.output_text.done"):
    """All words."""

    text: str
    logprobs: tuple[SampledLogprob, ...] = ()


class ReasoningDelta(InContent, kw_only=True, tag="response.reasoning_text.delta"):
    """New thoughts."""

    delta: str


class ReasoningDone(InContent, kw_only=True, tag="response.reasoning_text.done"):
    """All thoughts."""

    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    """New arguments; always all of them."""

    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    """All arguments."""

    name: str
    arguments: str


class CustomInputDelta(InItem, tag="response.custom_tool_call_input.delta"):
    """New input of a custom tool; always all of it."""

    delta: str


class InputDone(InItem, tag="response.custom_tool_call_input.done"):
    """All input of a custom tool."""

    input: str
