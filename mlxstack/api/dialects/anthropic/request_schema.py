"""The request bodies of the Anthropic door, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.api.common_fields import Fields

Content = str | list[dict[str, Any]]


class MessageParam(Struct):
    """One message; its blocks are read where their kinds are known."""

    role: str
    content: Content | None


class ToolParam(Struct):
    """A tool. Those that a vendor's server would run have a `type` and no `input_schema`."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct):
    """Whether a tool may, must or must not be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Whether to think first, and for how many tokens at most."""

    type: str
    budget_tokens: int | None = None


class Format(Struct):
    """The schema of a structured answer."""

    type: str | None = None
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    """How hard to think, and in which shape to answer."""

    effort: str | None = None
    format: Format | None = None


class MessagesBody(Fields, kw_only=True):
    """POST /v1/messages, and the same without limits for /v1/messages/count_tokens."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)

    messages: list[MessageParam]
    system: Content | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
