"""Buffer of streamed text with searches that wait for more text.

The searches are generators: one that yields cannot decide yet, and goes on with more text. Each
result depends on the whole text alone, never on how it was cut.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from msgspec import Struct

from mlxstack.text.formats.description import COUNT, pieces

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE, _DIGITS = re.compile(r"\s*"), re.compile(r"\d*")


class FoundMark(Struct, frozen=True):
    """A mark in a text. `text` is empty if there is none: then `start` is the end of the text."""

    start: int
    text: str = ""

    @property
    def end(self) -> int:
        """The position after the mark."""
        return self.start + len(self.text)


class MarkSet:
    """Texts to search for; the first one counts, and of two at one place the longer."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._firsts = frozenset(mark[0] for mark in self.marks)
        self._longest = len(self.marks[0]) if self.marks else 0

    def search(self, text: str, at: int, *, is_final: bool) -> FoundMark | None:
        """The first mark; None and nothing before `hold` if more text may change it."""
        found = self._pattern.search(text, at)
        if found is not None and (is_final or found.start() < self.hold(text, at)):
            return FoundMark(found.start(), found[0])
        return None

    def hold(self, text: str, at: int) -> int:
        """Where the text begins that may become a mark."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                rest = text[start:]
                if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self.marks):
                    return start
        return len(text)


class TextFeed:
    """The text of one answer that is still needed; positions count from its beginning."""

    def __init__(self) -> None:
        self.text = ""
        self.is_final = False

    def drop(self, end: int) -> None:
        """Forget the text before `end`."""
        self.text = self.text[end:]

    def find(self, marks: MarkSet, at: int) -> Reading[FoundMark | None]:
        """The first mark after `at`; None if there is none up to the end."""
        while True:
            found = marks.search(self.text, at, is_final=self.is_final)
            if found is not None or self.is_final:
                return found
            at = max(at, marks.hold(self.text, at))
            yield

    def space(self, at: int) -> Reading[int]:
        """The position after white space."""
        return (yield from self._after(_SPACE, at))

    def _after(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """The position after the longest match."""
        while True:
            found = pattern.match(self.text, at)
            at = found.end() if found else at
            if at < len(self.text) or self.is_final:
                return at
            yield

    def starts(self, text: str, at: int) -> Reading[bool]:
        """Whether `text` stands at a position."""
        while not self.is_final and len(self.text) - at < len(text):
            if not text.startswith(self.text[at:]):
                return False
            yield
        return self.text.startswith(text, at)

    def literal(self, literal: str, at: int) -> Reading[int | None]:
        """The position after a literal, whose white space may vary; None if it is not there."""
        for piece in pieces(literal):
            at = yield from self.space(at)
            if piece == COUNT:
                end = yield from self._after(_DIGITS, at)
            else:
                end = at + len(piece) * (yield from self.starts(piece, at))
            if end == at:
                return None
            at = end
        return at

    def optional(self, literal: str, at: int) -> Reading[int]:
        """The position after as many pieces of a literal as are there."""
        for piece in pieces(literal):
            found = yield from self.literal(piece, at)
            at = at if found is None else found
        return at

    def balanced(self, at: int, quotes: tuple[str, ...], stops: tuple[str, ...]) -> Reading[int]:
        """The position after the bracket or quote that closes the one at `at`; -1 if none does.

        Text between `quotes` counts for nothing, nor does what a backslash escapes in it; one of
        `stops` outside of it ends the search in vain.
        """
        is_escaping = all(len(quote) == 1 for quote in quotes)
        outside = MarkSet([*"[]{}()", *quotes, *stops])
        inside = {quote: MarkSet([quote, "\\"] if is_escaping else [quote]) for quote in quotes}
        depth, quote = 0, ""
        while True:
            found = yield from self.find(inside[quote] if quote else outside, at)
            if found is None or (not quote and found.text in stops):
                return -1
            at = found.end
            if found.text == "\\":
                at += 1
            elif found.text == quote:
                quote = ""
                if depth == 0:
                    return at
            elif found.text in quotes:
                quote = found.text
            else:
                depth += 1 if found.text in "[{(" else -1
                if depth == 0:
                    return at
