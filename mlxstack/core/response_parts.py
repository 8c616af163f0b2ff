"""Parts of a reply in order, for every dialect to render."""

from collections.abc import AsyncIterable
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import ToolCall
from mlxstack.core.engine_events import FinishReason, RequestTimings, SlotAssigned, TokenSampled


class PrefillProgressed(Struct, frozen=True):
    """`n_done` of `n_prompt` tokens are computed, `elapsed_ms` after the slot was assigned."""

    n_done: int
    n_prompt: int
    n_cached: int
    elapsed_ms: int


class KeepAlive(Struct, frozen=True):
    """Silence for a while; a dialect sends its heartbeat."""

    n_done: int
    n_prompt: int


class ReasoningPart(Struct, frozen=True):
    text: str
    notes: tuple[TokenSampled, ...] = ()


class ContentPart(Struct, frozen=True):
    text: str
    notes: tuple[TokenSampled, ...] = ()


class ToolCallStarted(Struct, frozen=True):
    """Tool call whose name is certain; its arguments follow in pieces."""

    id: str
    name: str


class ArgumentsPart(Struct, frozen=True):
    """Piece of the JSON text of a call's arguments."""

    text: str
    notes: tuple[TokenSampled, ...] = ()


class CallBlock(Struct, frozen=True):
    """Calls between one pair of marks, and their sampled tokens."""

    calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]
    is_closed: bool
    """Whether the closing mark was sampled too; otherwise the end of the answer closed it."""


class ToolCallPart(Struct, frozen=True):
    """Tool call after its pieces, whose sum is `arguments_json`.

    The end of the answer cut the arguments of a call that `is_cut`: `arguments_json` is the
    beginning of a JSON object, and `arguments` is that object, closed.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_json: str
    is_cut: bool = False


def in_pieces(call: ToolCallPart) -> tuple[ToolCallStarted, ArgumentsPart, ToolCallPart]:
    """The parts of a call that is sent at once."""
    return ToolCallStarted(call.id, call.name), ArgumentsPart(call.arguments_json), call


class GenerationFinished(Struct, frozen=True):
    """Last part.

    `stop_string` is the one that matched; `notes` are left-over tokens. `n_unparsed` counts tool
    calls that could not be parsed and were returned as text.
    """

    ending: FinishReason
    work: RequestTimings
    slot: int
    n_reasoning: int = 0
    stop_string: str | None = None
    notes: tuple[TokenSampled, ...] = ()
    n_unparsed: int = 0
    has_cut_call: bool = False
    """The end of the answer cut a call."""


NotedPart = ReasoningPart | ContentPart | ArgumentsPart
SpokenPart = ReasoningPart | ContentPart | ToolCallPart
AnswerPart = SpokenPart | ToolCallStarted | ArgumentsPart
ResponsePart = SlotAssigned | PrefillProgressed | KeepAlive | AnswerPart | GenerationFinished


class CollectedResponse(Struct, frozen=True):
    """Whole reply: sorted by kind, and in order as `spoken`."""

    started: SlotAssigned
    ended: GenerationFinished
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCallPart, ...] = ()
    notes: tuple[TokenSampled, ...] = ()
    spoken: tuple[SpokenPart, ...] = ()

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, none of them cut."""
        return bool(self.calls) and not self.calls[-1].is_cut


async def gather(parts: AsyncIterable[ResponsePart]) -> CollectedResponse:
    """Collect the whole reply."""
    started: SlotAssigned | None = None
    ended: GenerationFinished | None = None
    spoken: list[SpokenPart] = []
    notes: list[TokenSampled] = []
    async for part in parts:
        if isinstance(part, NotedPart | GenerationFinished):
            notes += part.notes
        match part:
            case SlotAssigned():
                started = part
            case ReasoningPart() | ContentPart() | ToolCallPart():
                spoken.append(part)
            case GenerationFinished():
                ended = part
                break
    assert started is not None and ended is not None, "a reply ends with its end or with an error"
    return CollectedResponse(
        started=started,
        ended=ended,
        reasoning="".join(part.text for part in spoken if isinstance(part, ReasoningPart)),
        content="".join(part.text for part in spoken if isinstance(part, ContentPart)),
        calls=tuple(part for part in spoken if isinstance(part, ToolCallPart)),
        notes=tuple(notes),
        spoken=tuple(spoken),
    )
