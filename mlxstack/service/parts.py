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
    """The last part. `word` is the stop string that was met; `notes` are left-over tokens."""

    ending: Ending
    work: Work
    slot: int
    n_reasoning: int = 0
    word: str | None = None
    notes: tuple[Note, ...] = ()


Part = Started | Progressed | Quiet | Reasoning | Content | Called | Ended


class Reply(Struct, frozen=True):
    """A whole reply."""

    started: Started
    ended: Ended
    reasoning: str = ""
    content: str = ""
    calls: tuple[Called, ...] = ()
    notes: tuple[Note, ...] = ()


async def gather(parts: AsyncIterable[Part]) -> Reply:
    """The whole reply, once its last part has come."""
    started: Started | None = None
    spoken: list[Reasoning | Content] = []
    calls: list[Called] = []
    async for part in parts:
        match part:
            case Started():
                started = part
            case Reasoning() | Content():
                spoken.append(part)
            case Called():
                calls.append(part)
            case Ended() as ended:
                assert started is not None
                return Reply(
                    started=started,
                    ended=ended,
                    reasoning="".join(p.text for p in spoken if isinstance(p, Reasoning)),
                    content="".join(p.text for p in spoken if isinstance(p, Content)),
                    calls=tuple(calls),
                    notes=tuple(n for p in (*spoken, ended) for n in p.notes),
                )
    raise AssertionError("a reply always ends with Ended or with an error")
