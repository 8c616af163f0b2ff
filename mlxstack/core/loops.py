"""Answers and calls that repeat themselves."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct


class LoopStops(StrEnum):
    """Whether answers that repeat themselves are ended."""

    AUTO = "auto"
    OFF = "off"


StopLoops = Annotated[
    LoopStops,
    Meta(
        description="auto ends an answer, or its thought, whose tokens repeat exactly for "
        "too long; off lets it go on. Requests may set it."
    ),
]


class LoopStop(Struct, frozen=True):
    """Tokens that repeated exactly, and were ended for it."""

    at: int
    """Number of the first token of the first copy; the first token of an answer is 0."""
    period: int
    """Tokens of one copy."""
    n_tokens: int
    """Tokens of all copies."""
    is_thought: bool = False
    """A thought, which was closed; the answer went on."""

    def __str__(self) -> str:
        part = "thought" if self.is_thought else "answer"
        copies = f"{self.period} tokens, {self.n_tokens / self.period:.1f} times"
        return f"{part}: {copies} from token {self.at} on"


class RepeatedCall(Struct, frozen=True):
    """Calls of the last turns, which had the same results each time."""

    name: str
    """The tool; several in their order."""
    n_times: int

    def __str__(self) -> str:
        return f"{self.name}, {self.n_times} times with the same result"
