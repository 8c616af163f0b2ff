"""Renders messages, whole or streamed, with one open block at a time."""

from collections.abc import Iterator

from msgspec import Struct

from mlxstack.api import streaming
from mlxstack.api.dialects.anthropic.response_schema import (
    AnthropicUsage,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    Event,
    InputJSONDelta,
    MessageDelta,
    MessageResponse,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from mlxstack.api.error_bodies import anthropic_error
from mlxstack.core.engine_events import RequestTimings, SlotAssigned
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    ArgumentsPart,
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
)

# Clients must receive one and send it back; it is not verified.
SIGNATURE = "bWx4LXN0YWNr"

STOP_REASONS = {
    FinishCause.EOS: "end_turn",
    FinishCause.WORD: "stop_sequence",
    FinishCause.LENGTH: "max_tokens",
    FinishCause.CONTEXT: "model_context_window_exceeded",
}


class ResponseIds(Struct, frozen=True):
    """Ids of a response: its own, its model's and its request's."""

    response_id: str
    model: str
    request: str


class MessageStream(streaming.Renderer):
    """Renders the parts of one reply as events."""

    def __init__(self, names: ResponseIds) -> None:
        self._names = names
        self._open: type[Block] | None = None
        self._n_blocks = 0
        self._has_calls = self._has_text = False

    def whole(self, replies: tuple[CollectedResponse, ...]) -> MessageResponse:
        """Whole message."""
        (reply,) = replies
        reason = reason_of(reply.ended, reply.has_calls)
        return MessageResponse(
            id=self._names.response_id,
            model=self._names.model,
            content=_blocks(reply) or (TextBlock(""),),
            usage=usage(reply.ended.work),
            stop_reason=reason.stop_reason,
            stop_sequence=reason.stop_sequence,
        )

    def render(self, _: int, part: ResponsePart) -> Iterator[bytes]:
        return map(_frame, self._events(part))

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(anthropic_error(error, self._names.request), "error")

    def _events(self, part: ResponsePart) -> Iterator[Event]:
        """Events of one part; before the start of the message only pings."""
        match part:
            case SlotAssigned():
                yield MessageStart(_begun(part, self._names))
            case KeepAlive():
                yield Ping()
            case ReasoningPart():
                yield from self._say(ThinkingBlock("", ""), ThinkingDelta(part.text))
            case ContentPart():
                is_apart = self._has_text and self._open is not TextBlock
                text = part.text.lstrip() if is_apart else part.text
                yield from self._say(TextBlock(""), TextBlockDelta(text))
                self._has_text = True
            case ToolCallStarted():
                yield from self._close()
                yield from self._start(ToolUseBlock(part.id, part.name, {}))
            case ArgumentsPart():
                yield BlockDelta(self._index, InputJSONDelta(part.text))
            case ToolCallPart():
                self._has_calls = not part.is_cut
                yield from self._close()
            case GenerationFinished():
                yield from self._end(part)

    def _say(self, block: Block, delta: Delta) -> Iterator[Event]:
        if self._open is not type(block):
            yield from self._close()
            yield from self._start(block)
        yield BlockDelta(self._index, delta)

    def _end(self, ended: GenerationFinished) -> Iterator[Event]:
        """Close the message; even an empty one has a block."""
        yield from self._close()
        if self._n_blocks == 0:
            yield from self._start(TextBlock(""))
            yield from self._close()
        yield MessageDelta(reason_of(ended, self._has_calls), usage(ended.work))
        yield MessageStop()

    @property
    def _index(self) -> int:
        return self._n_blocks - 1

    def _start(self, block: Block) -> Iterator[Event]:
        self._open = type(block)
        self._n_blocks += 1
        yield BlockStart(self._index, block)

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open is ThinkingBlock:
            yield BlockDelta(self._index, SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._index)


def _frame(event: Event) -> bytes:
    return streaming.frame(event, str(event.__struct_config__.tag))


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
    )


def reason_of(ended: GenerationFinished, has_calls: bool) -> StopReason:
    """Stop reason; complete tool calls are always `tool_use`."""
    if has_calls:
        return StopReason("tool_use", None)
    return StopReason(STOP_REASONS[ended.ending], ended.stop_string)


def _blocks(reply: CollectedResponse) -> tuple[Block, ...]:
    """Blocks of a reply in order; neighbors of one kind are joined.

    White space that separates a text from an earlier one is left out.
    """
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
                is_later = any(isinstance(one, TextBlock) for one in blocks)
                blocks.append(TextBlock(part.text.lstrip() if is_later else part.text))
            case ToolCallPart(), _:
                blocks.append(ToolUseBlock(part.id, part.name, part.arguments))
    return tuple(blocks)
