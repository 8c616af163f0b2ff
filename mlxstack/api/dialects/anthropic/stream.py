"""Renders messages, whole or streamed, with one open block at a time."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from msgspec import UNSET, Struct

from mlxstack.api import streaming
from mlxstack.api.block_renderer import BlockRenderer, BlockStart, StreamEvent
from mlxstack.api.dialects.anthropic.response_schema import (
    AnthropicUsage,
    Block,
    MessageResponse,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from mlxstack.api.error_bodies import anthropic_error
from mlxstack.core.engine_events import FinishReason, RequestTimings, SlotAssigned
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    NotedPart,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
)

# Clients must receive one and send it back; it is not verified.
SIGNATURE = "bWx4LXN0YWNr"

STOP_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.WORD: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT: "model_context_window_exceeded",
    FinishReason.LOOP: "end_turn",
}
# Type and field of the deltas of a block.
DELTAS = {
    TextBlock: ("text_delta", "text"),
    ThinkingBlock: ("thinking_delta", "thinking"),
    ToolUseBlock: ("input_json_delta", "partial_json"),
}


class ResponseIds(Struct, frozen=True):
    """Ids of a response: its own, its model's and its request's."""

    response_id: str
    model: str
    request: str


class MessageStream(BlockRenderer):
    """Renders the parts of one reply as events."""

    def __init__(self, names: ResponseIds) -> None:
        super().__init__()
        self._names = names
        self._kind: type[Block] = TextBlock
        self._index = -1
        self._has_calls = False

    def whole(self, replies: tuple[CollectedResponse, ...]) -> MessageResponse:
        """Whole message."""
        (reply,) = replies
        return MessageResponse(
            id=self._names.response_id,
            model=self._names.model,
            content=_blocks(reply) or (TextBlock(""),),
            usage=usage(reply.ended.work),
            **stop_reason(reply.ended, reply.has_calls),
        )

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(anthropic_error(error, self._names.request), "error")

    def events(self, part: ResponsePart) -> Iterator[StreamEvent]:
        """Events of one part; before the start of the message only pings."""
        match part:
            case SlotAssigned():
                yield {"type": "message_start", "message": _begun(part, self._names)}
            case KeepAlive():
                yield {"type": "ping"}
            case GenerationFinished():
                yield from self._finish(part)
            case _:
                yield from super().events(part)

    def begin(self, part: BlockStart) -> Iterator[StreamEvent]:
        """Start of an empty block; a call's `input` is empty too."""
        block: Block = TextBlock("")
        match part:
            case ReasoningPart():
                block = ThinkingBlock("", "")
            case ToolCallStarted():
                block = ToolUseBlock(part.id, part.name, {})
        self._kind = type(block)
        self._index += 1
        yield self._event("start", content_block=block)

    def add(self, part: NotedPart) -> Iterator[StreamEvent]:
        """Delta of the open block."""
        kind, field = DELTAS[self._kind]
        yield self._event("delta", delta={"type": kind, field: part.text})

    def end(self, *, is_cut: bool) -> Iterator[StreamEvent]:
        """End of the open block; that of reasoning has the signature before."""
        if self._kind is ToolUseBlock:
            self._has_calls = not is_cut
        if self._kind is ThinkingBlock:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._event("delta", delta=delta)
        yield self._event("stop")

    def _finish(self, ended: GenerationFinished) -> Iterator[StreamEvent]:
        """Close the message; even an empty one has a block."""
        if self._index < 0:
            yield from self.open(ContentPart(""))
        yield from self.close()
        reason = stop_reason(ended, self._has_calls)
        yield {"type": "message_delta", "delta": reason, "usage": usage(ended.work)}
        yield {"type": "message_stop"}

    def _event(self, name: str, **fields: Any) -> StreamEvent:
        return {"type": f"content_block_{name}", "index": self._index, **fields}


def _begun(started: SlotAssigned, names: ResponseIds) -> MessageResponse:
    """Message at its start; Anthropic counts one output token from there."""
    work = RequestTimings(n_prompt=started.n_prompt, n_cached=started.n_cached, n_generated=1)
    return MessageResponse(id=names.response_id, model=names.model, content=(), usage=usage(work))


def usage(work: RequestTimings) -> AnthropicUsage:
    """Token usage: reused tokens as cache reads, cache writes as free."""
    return AnthropicUsage(
        input_tokens=work.n_prompt - work.n_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=work.n_cached,
        output_tokens=work.n_generated,
        loops=work.loops or UNSET,
    )


def stop_reason(ended: GenerationFinished, has_calls: bool) -> dict[str, Any]:
    """Stop reason and sequence; complete tool calls are always `tool_use`."""
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    ending = ended.ending
    if ending is FinishReason.LOOP and ended.has_cut_call:
        ending = FinishReason.LENGTH
    return {"stop_reason": STOP_REASONS[ending], "stop_sequence": ended.stop_string}


def _blocks(reply: CollectedResponse) -> tuple[Block, ...]:
    """Blocks of a reply in order; neighbors of one kind are joined.

    White space that separates a block from an earlier text is left out.
    """
    blocks: list[Block] = []
    has_text = False
    for kind, group in groupby(reply.spoken, type):
        texts: list[str] = []
        for part in group:
            if isinstance(part, ToolCallPart):
                blocks.append(ToolUseBlock(part.id, part.name, part.arguments))
            else:
                texts.append(part.text.lstrip() if has_text and not texts else part.text)
        if kind is ReasoningPart:
            blocks.append(ThinkingBlock("".join(texts), SIGNATURE))
        elif kind is ContentPart:
            has_text = True
            blocks.append(TextBlock("".join(texts)))
    return tuple(blocks)
