"""Parts of a reply in order, for every dialect to render."""

from collections.abc import AsyncIterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from mlxstack.core.engine_events import CacheMiss, KVSource, RequestTimings


class TokenLogprob(Struct, frozen=True):
    """Sampled token; logprob and best (token, logprob) pairs only on request."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class GenerationStarted(Struct, frozen=True):
    """Request has its `slot`; `n_cached` of its `n_prompt` tokens are reused."""

    slot: int
    n_prompt: int
    n_cached: int
    source: KVSource = KVSource.NONE
    miss: CacheMiss | None = None

    @property
    def n_lost(self) -> int:
        """Computed tokens that could have been reused."""
        return self.miss.n_recomputed(self.n_prompt - self.n_cached) if self.miss else 0


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
    notes: tuple[TokenLogprob, ...] = ()


class ContentPart(Struct, frozen=True):
    text: str
    notes: tuple[TokenLogprob, ...] = ()


class ToolCallPart(Struct, frozen=True):
    """Complete tool call."""

    id: str
    name: str
    arguments: dict[str, Any]


class FinishCause(StrEnum):
    """Cause of the end. WORD is a stop string of the request."""

    EOS = "eos"
    WORD = "word"
    LENGTH = "length"
    CONTEXT = "context"


class GenerationFinished(Struct, frozen=True):
    """Last part.

    `stop_string` is the one that matched; `notes` are left-over tokens. `n_unparsed` counts tool
    calls that could not be parsed and were returned as text.
    """

    ending: FinishCause
    work: RequestTimings
    slot: int
    n_reasoning: int = 0
    stop_string: str | None = None
    notes: tuple[TokenLogprob, ...] = ()
    n_unparsed: int = 0


SpokenPart = ReasoningPart | ContentPart | ToolCallPart
ResponsePart = GenerationStarted | PrefillProgressed | KeepAlive | SpokenPart | GenerationFinished


class CollectedResponse(Struct, frozen=True):
    """Whole reply: sorted by kind, and in order as `spoken`."""

    started: GenerationStarted
    ended: GenerationFinished
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCallPart, ...] = ()
    notes: tuple[TokenLogprob, ...] = ()
    spoken: tuple[SpokenPart, ...] = ()


async def gather(parts: AsyncIterable[ResponsePart]) -> CollectedResponse:
    """Collect the whole reply."""
    started: GenerationStarted | None = None
    spoken: list[SpokenPart] = []
    async for part in parts:
        match part:
            case GenerationStarted():
                started = part
            case ReasoningPart() | ContentPart() | ToolCallPart():
                spoken.append(part)
            case GenerationFinished():
                assert started is not None
                return _whole(started, spoken, part)
    raise AssertionError("a reply always ends with Ended or with an error")


def _whole(
    started: GenerationStarted, spoken: list[SpokenPart], ended: GenerationFinished
) -> CollectedResponse:
    noted = [part for part in spoken if not isinstance(part, ToolCallPart)]
    return CollectedResponse(
        started=started,
        ended=ended,
        reasoning="".join(part.text for part in noted if isinstance(part, ReasoningPart)),
        content="".join(part.text for part in noted if isinstance(part, ContentPart)),
        calls=tuple(part for part in spoken if isinstance(part, ToolCallPart)),
        notes=tuple(note for part in (*noted, ended) for note in part.notes),
        spoken=tuple(spoken),
    )
