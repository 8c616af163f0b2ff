"""The shapes of messages, whole and as the events of a stream."""

from typing import Any

from msgspec import Struct

from mlxstack.core.engine_events import RequestTimings
from mlxstack.service.response_parts import (
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    GenerationStarted,
    ReasoningPart,
    ToolCallPart,
)

# Clients must find one and send it back; nobody verifies it.
SIGNATURE = "bWx4LXN0YWNr"

STOP_REASONS = {
    FinishCause.EOS: "end_turn",
    FinishCause.WORD: "stop_sequence",
    FinishCause.LENGTH: "max_tokens",
    FinishCause.CONTEXT: "model_context_window_exceeded",
}


class AnthropicUsage(Struct, frozen=True):
    """The first three add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Struct, frozen=True, tag="text"):
    """Words."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """Thoughts."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageResponse(Struct, frozen=True, tag="message"):
    """The answer; at the start of a stream without content and reason."""

    id: str
    model: str
    content: tuple[Block, ...]
    usage: AnthropicUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TextBlockDelta(Struct, frozen=True, tag="text_delta"):
    """More words."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    """The end of a block of thoughts."""

    signature: str


class InputJSONDelta(Struct, frozen=True, tag="input_json_delta"):
    """The arguments of a call."""

    partial_json: str


Delta = TextBlockDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class StopReason(Struct, frozen=True):
    """Why the answer is over."""

    stop_reason: str
    stop_sequence: str | None


class MessageStart(Struct, frozen=True, tag="message_start"):
    """The answer begins."""

    message: MessageResponse


class Ping(Struct, frozen=True, tag="ping"):
    """Still there."""


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """An empty block opens; `input` of a call is empty too."""

    index: int
    content_block: Block


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """The open block grows."""

    index: int
    delta: Delta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """The open block is complete."""

    index: int


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    """The final truth about reason and usage."""

    delta: StopReason
    usage: AnthropicUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The answer is over."""


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True):
    """The answer of count_tokens."""

    input_tokens: int


def message(reply: CollectedResponse, request: str, model: str) -> MessageResponse:
    """The whole answer."""
    content = _blocks(reply)
    reason = reason_of(reply.ended, bool(reply.calls))
    return MessageResponse(
        id=request,
        model=model,
        content=content or (TextBlock(""),),
        usage=usage(reply.ended.work),
        stop_reason=reason.stop_reason,
        stop_sequence=reason.stop_sequence,
    )


def opening(started: GenerationStarted, request: str, model: str) -> MessageResponse:
    """The answer as it begins; Anthropic counts one token from the start."""
    work = RequestTimings(n_prompt=started.n_prompt, n_cached=started.n_cached, n_generated=1)
    return MessageResponse(id=request, model=model, content=(), usage=usage(work))


def usage(work: RequestTimings) -> AnthropicUsage:
    """Reused tokens were read from the cache; writing to it has no price here."""
    return AnthropicUsage(
        input_tokens=work.n_prompt - work.n_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=work.n_cached,
        output_tokens=work.n_generated,
    )


def reason_of(ended: GenerationFinished, has_calls: bool) -> StopReason:
    """A complete call wants its result, whatever ended the answer (A-23u)."""
    if has_calls:
        return StopReason("tool_use", None)
    return StopReason(STOP_REASONS[ended.ending], ended.stop_string)


def _blocks(reply: CollectedResponse) -> tuple[Block, ...]:
    """Neighbours of one kind as one block, in the order in which they were said."""
    blocks: list[Block] = []
    for part in reply.spoken:
        last = blocks[-1] if blocks else None
        match part, last:
            case ReasoningPart(), ThinkingBlock():
                blocks[-1] = ThinkingBlock(last.thinking + part.text, SIGNATURE)
            case ReasoningPart(), _:
                blocks.append(ThinkingBlock(part.text, SIGNATURE))
            case ContentPart(), TextBlock():
                blocks[-1] = TextBlock(last.text + part.text)
            case ContentPart(), _:
                blocks.append(TextBlock(part.text))
            case ToolCallPart(), _:
                blocks.append(ToolUseBlock(part.id, part.name, part.arguments))
    return tuple(blocks)
