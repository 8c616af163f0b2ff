"""The events of a streamed answer: one block open at a time, indices without gaps."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec
from msgspec import Struct

from mlxstack.api import sse
from mlxstack.api.dialects.anthropic.response_schema import (
    SIGNATURE,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    Event,
    InputJSONDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    opening,
    reason_of,
    usage,
)
from mlxstack.api.errors import Dialect, to_stack_error
from mlxstack.api.errors import body as error_body
from mlxstack.api.run_generation import Parts
from mlxstack.service.response_parts import (
    ContentPart,
    GenerationFinished,
    GenerationStarted,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
)


class ResponseIds(Struct, frozen=True):
    """What an answer is called: its own id, its model, and the request it belongs to."""

    engine_request: str
    model: str
    request: str


async def frames(
    first: ResponsePart, rest: Parts, names: ResponseIds
) -> AsyncGenerator[bytes, None]:
    """The stream, up to message_stop, or to the error that ended it."""
    stream = MessageStream(names)
    async with aclosing(rest):
        try:
            for event in stream.render(first):
                yield _frame(event)
            async for part in rest:
                for event in stream.render(part):
                    yield _frame(event)
        except Exception as problem:
            body = error_body(to_stack_error(problem), Dialect.ANTHROPIC, names.request)
            yield sse.frame(body, "error")


class MessageStream:
    """Turns the parts of one reply into events."""

    def __init__(self, names: ResponseIds) -> None:
        self._names = names
        self._open: type[Block] | None = None
        self._n_blocks = 0
        self._has_calls = False

    def render(self, part: ResponsePart) -> Iterator[Event]:
        """The events of one part; before the answer begins there can only be pings (X-21)."""
        match part:
            case GenerationStarted():
                yield MessageStart(opening(part, self._names.engine_request, self._names.model))
            case KeepAlive():
                yield Ping()
            case ReasoningPart():
                yield from self._say(ThinkingBlock("", ""), ThinkingDelta(part.text))
            case ContentPart():
                yield from self._say(TextBlock(""), TextBlockDelta(part.text))
            case ToolCallPart():
                yield from self._call(part)
            case GenerationFinished():
                yield from self._end(part)

    def _say(self, block: Block, delta: Delta) -> Iterator[Event]:
        if self._open is not type(block):
            yield from self._close()
            yield from self._start(block)
        yield BlockDelta(self._index, delta)

    def _call(self, called: ToolCallPart) -> Iterator[Event]:
        """The arguments come at once, since they are only understood as a whole (A-30)."""
        self._has_calls = True
        yield from self._close()
        yield from self._start(ToolUseBlock(called.id, called.name, {}))
        arguments = msgspec.json.encode(called.arguments).decode()
        yield BlockDelta(self._index, InputJSONDelta(arguments))
        yield from self._close()

    def _end(self, ended: GenerationFinished) -> Iterator[Event]:
        """Even an empty answer has a block (A-22u)."""
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
    return sse.frame(event, str(event.__struct_config__.tag))
