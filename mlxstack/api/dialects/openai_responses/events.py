"""The events of a Responses stream; every one is numbered (R-2)."""

from msgspec import Struct

from mlxstack.api import sse
from mlxstack.api.dialects.openai_responses.response_schema import OutputItem, OutputText, Response
from mlxstack.api.logprobs import SampledLogprob


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


def frame(event: ResponsesEvent) -> bytes:
    """The event as it is sent, named by its type."""
    return sse.frame(event, str(type(event).__struct_config__.tag))
