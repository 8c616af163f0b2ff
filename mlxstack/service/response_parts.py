"""The parts of a reply, in the order in which they happen, for every dialect to render."""

from collections.abc import AsyncIterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from mlxstack.core.engine_events import CacheMiss, KVSource, RequestTimings


class TokenLogprob(Struct, frozen=True):
    """A chosen token; its logprob and the best (token, logprob) pairs only when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class GenerationStarted(Struct, frozen=True):
    """The ask sits in `slot`, and `n_cached` of its `n_prompt` tokens need not be computed."""

    slot: int
    n_prompt: int
    n_cached: int
    source: KVSource = KVSource.NONE
    miss: CacheMiss | None = None


class PrefillProgressed(Struct, frozen=True):
    """`n_done` of `n_prompt` tokens are in the KV cache, `elapsed_ms` after the seat was taken."""

    n_done: int
    n_prompt: int
    n_cached: int
    elapsed_ms: int


class KeepAlive(Struct, frozen=True):
    """Nothing happened for a while; a dialect sends its heartbeat."""

    n_done: int
    n_prompt: int


class ReasoningPart(Struct, frozen=True):
    """A stretch of thinking."""

    text: str
    notes: tuple[TokenLogprob, ...] = ()


class ContentPart(Struct, frozen=True):
    """A stretch of the answer."""

    text: str
    notes: tuple[TokenLogprob, ...] = ()


class ToolCallPart(Struct, frozen=True):
    """A complete tool call."""

    id: str
    name: str
    arguments: dict[str, Any]


class FinishCause(StrEnum):
    """Why the reply ended. WORD is a stop string of the request."""

    EOS = "eos"
    WORD = "word"
    LENGTH = "length"
    CONTEXT = "context"


class GenerationFinished(Struct, frozen=True):
    """The last part. `word` is the stop string that was met; `notes` are left-over tokens.

    `n_unparsed` counts tool calls that made no sense and became text.
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
    """A whole reply: sorted by kind, and as `spoken` in the order in which it was said."""

    started: GenerationStarted
    ended: GenerationFinished
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCallPart, ...] = ()
    notes: tuple[TokenLogprob, ...] = ()
    spoken: tuple[SpokenPart, ...] = ()


async def gather(parts: AsyncIterable[ResponsePart]) -> CollectedResponse:
    """The whole reply, once its last part has come."""
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
