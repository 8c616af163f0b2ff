"""The parts of a reply, in the order in which they happen, for every dialect to render."""

from collections.abc import AsyncIterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from mlxstack.core.event import Miss, Source, Work


class Note(Struct, frozen=True):
    """A chosen token; its logprob and the best (token, logprob) pairs only when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Started(Struct, frozen=True):
    """The ask sits in `slot`, and `n_cached` of its `n_prompt` tokens need not be computed."""

    slot: int
    n_prompt: int
    n_cached: int
    source: Source = Source.NONE
    miss: Miss | None = None


class Progressed(Struct, frozen=True):
    """`n_done` of `n_prompt` tokens are in the KV cache, `elapsed_ms` after the seat was taken."""

    n_done: int
    n_prompt: int
    n_cached: int
    elapsed_ms: int


class Quiet(Struct, frozen=True):
    """Nothing happened for a while; a dialect sends its heartbeat."""

    n_done: int
    n_prompt: int


class Reasoning(Struct, frozen=True):
    """A stretch of thinking."""

    text: str
    notes: tuple[Note, ...] = ()


class Content(Struct, frozen=True):
    """A stretch of the answer."""

    text: str
    notes: tuple[Note, ...] = ()


class Called(Struct, frozen=True):
    """A complete tool call."""

    id: str
    name: str
    arguments: dict[str, Any]


class Ending(StrEnum):
    """Why the reply ended. WORD is a stop string of the request."""

    EOS = "eos"
    WORD = "word"
    LENGTH = "length"
    CONTEXT = "context"


class Ended(Struct, frozen=True):
    """The last part. `word` is the stop string that was met; `notes` are left-over tokens.

    `n_unparsed` counts tool calls that made no sense and became text.
    """

    ending: Ending
    work: Work
    slot: int
    n_reasoning: int = 0
    word: str | None = None
    notes: tuple[Note, ...] = ()
    n_unparsed: int = 0


Spoken = Reasoning | Content | Called
Part = Started | Progressed | Quiet | Spoken | Ended


class Reply(Struct, frozen=True):
    """A whole reply: sorted by kind, and as `spoken` in the order in which it was said."""

    started: Started
    ended: Ended
    reasoning: str = ""
    content: str = ""
    calls: tuple[Called, ...] = ()
    notes: tuple[Note, ...] = ()
    spoken: tuple[Spoken, ...] = ()


async def gather(parts: AsyncIterable[Part]) -> Reply:
    """The whole reply, once its last part has come."""
    started: Started | None = None
    spoken: list[Spoken] = []
    async for part in parts:
        match part:
            case Started():
                started = part
            case Reasoning() | Content() | Called():
                spoken.append(part)
            case Ended():
                assert started is not None
                return _whole(started, spoken, part)
    raise AssertionError("a reply always ends with Ended or with an error")


def _whole(started: Started, spoken: list[Spoken], ended: Ended) -> Reply:
    noted = [part for part in spoken if not isinstance(part, Called)]
    return Reply(
        started=started,
        ended=ended,
        reasoning="".join(part.text for part in noted if isinstance(part, Reasoning)),
        content="".join(part.text for part in noted if isinstance(part, Content)),
        calls=tuple(part for part in spoken if isinstance(part, Called)),
        notes=tuple(note for part in (*noted, ended) for note in part.notes),
        spoken=tuple(spoken),
    )
