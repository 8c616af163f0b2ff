"""Response bodies of the Messages API."""

from typing import Any

from msgspec import UNSET, Struct

from mlxstack.api.response_fields import Loops


class AnthropicUsage(Struct, frozen=True):
    """Token counts; the first three add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    loops: Loops = UNSET


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageResponse(Struct, frozen=True, tag="message"):
    """Whole message, or the empty one at the start of a stream."""

    id: str
    model: str
    content: tuple[Block, ...]
    usage: AnthropicUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TokenCount(Struct, frozen=True):
    input_tokens: int
