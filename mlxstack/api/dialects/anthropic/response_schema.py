"""Response bodies of the Messages API, and the events of its stream."""

from typing import Any

from msgspec import Struct


class AnthropicUsage(Struct, frozen=True):
    """Token counts; the first three add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


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


class TextBlockDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    """Signature, which ends a reasoning block."""

    signature: str


class InputJSONDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


Delta = TextBlockDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class StopReason(Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: MessageResponse


class Ping(Struct, frozen=True, tag="ping"):
    """Heartbeat."""


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """Start of an empty block; a call's `input` is empty too."""

    index: int
    content_block: Block


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    """Final stop reason and usage."""

    delta: StopReason
    usage: AnthropicUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """Last event of a message."""


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True):
    input_tokens: int
