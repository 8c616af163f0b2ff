"""Request bodies of the Messages API, read leniently."""

from typing import Any, ClassVar

from msgspec import Struct, field

from mlxstack.api.request_fields import Fields, SchemaFields
from mlxstack.api.response_format import ResponseFormat

Content = str | list[str | dict[str, Any]]


class TextInput(Struct, tag="text"):
    text: str


class ImageInput(Struct, tag="image"):
    """Image, which a text model cannot read."""

    source: Any = None


class DocumentInput(Struct, tag="document"):
    """Document; its text can be read when the source carries it."""

    source: dict[str, Any] = field(default_factory=dict)
    title: str | None = None
    context: str | None = None


class SearchResult(Struct, tag="search_result"):
    """Search result of the client."""

    content: list[dict[str, Any]] = field(default_factory=list)
    title: str | None = None
    source: str | None = None


class ThinkingInput(Struct, tag="thinking"):
    """Reasoning of the assistant; its signature is ignored."""

    thinking: str = ""


class ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Any = None


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None


class ServerToolResult(Struct, tag="server_tool_result"):
    """Result of a tool that ran on Anthropic's servers."""

    tool_use_id: str
    content: Any = None


class ToolReference(Struct, tag="tool_reference"):
    """Tool that a search among deferred ones returned."""

    tool_name: str


class ToolAddition(Struct, tag="tool_addition"):
    """Tool that is available from here on, by name or by definition."""

    tool: dict[str, Any]


class ToolRemoval(Struct, tag="tool_removal"):
    """Tool that is unavailable from here on."""

    tool: dict[str, Any]


Block = (
    TextInput
    | ImageInput
    | DocumentInput
    | SearchResult
    | ThinkingInput
    | ToolUse
    | ToolResult
    | ServerToolResult
    | ToolReference
    | ToolAddition
    | ToolRemoval
)
KINDS = frozenset(str(kind.__struct_config__.tag) for kind in Block.__args__)


class MessageParam(Struct):
    """One message; its blocks are read where their kinds are known.

    One of the system may have settings only, which are ignored.
    """

    role: str
    content: Content | None = None


class ToolParam(SchemaFields):
    """Tool; tools of a vendor's server lack `input_schema`.

    They have a `type`.
    """

    name: str | None = None
    description: str | None = None
    type: str | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct):
    """Tool choice: auto, any, a named tool, or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Thinking mode, and the most tokens of it."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(Struct):
    """Reasoning effort and output format."""

    effort: str | None = None
    format: ResponseFormat | None = None


class MessagesBody(Fields, kw_only=True):
    """POST /v1/messages, and the same without limits for /v1/messages/count_tokens.

    A limit of 0 computes the prompt and nothing else, so that its KV is there.
    """

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    least: ClassVar[int] = 0
    messages: list[MessageParam]
    system: Content | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    stop_sequences: list[str | None] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    thread: Any = None
    compaction: dict[str, Any] | None = None

    @property
    def server_names(self) -> tuple[str, ...]:
        """Names of servers of MCP, whose tools Anthropic's servers would call."""
        return tuple(str(server.get("name")) for server in self.mcp_servers or ())
