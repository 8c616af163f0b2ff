"""Renders a reply as blocks of text, reasoning and calls."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from msgspec import structs

from mlxstack.api import streaming
from mlxstack.core.response_parts import (
    ArgumentsPart,
    ContentPart,
    NotedPart,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
)

StreamEvent = dict[str, Any]
"""Event of a stream; `type` is its name."""
BlockStart = ReasoningPart | ContentPart | ToolCallStarted


class BlockRenderer(streaming.Renderer):
    """Renderer of one reply; a dialect gives the events of its blocks."""

    def __init__(self) -> None:
        self._open: type[BlockStart] | None = None
        self._has_text = False

    @abstractmethod
    def begin(self, part: BlockStart) -> Iterator[StreamEvent]:
        """Events at the start of an empty block of this kind."""

    @abstractmethod
    def add(self, part: NotedPart) -> Iterator[StreamEvent]:
        """Events of a piece of the open block."""

    @abstractmethod
    def end(self, *, is_cut: bool) -> Iterator[StreamEvent]:
        """Events at the end of the open block."""

    def events(self, part: ResponsePart) -> Iterator[StreamEvent]:
        """Events of a part: those of blocks."""
        match part:
            case ReasoningPart() | ContentPart():
                if self._open is not type(part):
                    yield from self.open(part)
                    # White space separates two texts, which are blocks of their own here.
                    text = part.text.lstrip() if self._has_text else part.text
                    part = structs.replace(part, text=text)
                self._has_text |= isinstance(part, ContentPart)
                yield from self.add(part)
            case ToolCallStarted():
                yield from self.open(part)
            case ArgumentsPart():
                yield from self.add(part)
            case ToolCallPart():
                yield from self.close(is_cut=part.is_cut)

    def open(self, part: BlockStart) -> Iterator[StreamEvent]:
        """Events of a block that takes the place of the open one."""
        yield from self.close()
        self._open = type(part)
        yield from self.begin(part)

    def close(self, *, is_cut: bool = False) -> Iterator[StreamEvent]:
        """Events at the end of the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield from self.end(is_cut=is_cut)

    def render(self, _: int, part: ResponsePart) -> Iterator[bytes]:
        return map(self.frame, self.events(part))

    def frame(self, event: StreamEvent) -> bytes:
        """Server-sent event of an event."""
        return streaming.frame(event, event["type"])
