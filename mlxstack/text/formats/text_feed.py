"""Text feed: incremental searches in streamed text, and white space trimming.

The searches are generators: one that yields cannot decide yet, and goes on with more text. Each
result depends on the whole text alone, never on how it was cut.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from msgspec import Struct

from mlxstack.text.formats.syntax import COUNT, pieces

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"\w*")
_DIGITS = re.compile(r"\d*")
# The text of a tag before the quoted value of an attribute, or after it.
_ATTRIBUTE = re.compile(r'[^"]+="|"[^"\w:,]*')
FENCE = "```"


class FoundMark(Struct, frozen=True):
    """Mark in a text; without one `text` is empty, `start` the end."""

    start: int
    text: str = ""

    @property
    def end(self) -> int:
        """The position after the mark."""
        return self.start + len(self.text)


class MarkSet:
    """Texts to search for: first match wins, then the longest."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._firsts = frozenset(mark[0] for mark in self.marks)
        self._longest = len(self.marks[0]) if self.marks else 0

    def search(self, text: str, at: int, *, is_final: bool) -> FoundMark | None:
        """First mark from `at`; None while more text may change it."""
        hit = self._pattern.search(text, at)
        if hit is not None and (is_final or hit.start() < self.hold(text, at)):
            return FoundMark(hit.start(), hit[0])
        return None

    def hold(self, text: str, at: int) -> int:
        """Start of the text that may become a mark."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                rest = text[start:]
                if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self.marks):
                    return start
        return len(text)


class TextFeed:
    """Unread text of one answer; positions count from its start.

    `is_final`: no more text comes; `is_cut`: more would have come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_final = self.is_cut = False

    def drop(self, end: int) -> None:
        """Forget the text before `end`."""
        self.text = self.text[end:]

    def find(
        self, marks: MarkSet, at: int, within: re.Pattern[str] | None = None
    ) -> Reading[FoundMark]:
        """First mark after `at`, or none at the end of the text.

        All text before it has to match `within`.
        """
        start = at
        while True:
            mark = marks.search(self.text, at, is_final=self.is_final)
            if mark is not None:
                return mark
            at = max(at, marks.hold(self.text, at))
            is_within = within is None or within.fullmatch(self.text, start, at)
            if self.is_final or not is_within:
                return FoundMark(len(self.text))
            yield

    def space(self, at: int) -> Reading[int]:
        """The position after white space."""
        return (yield from self.after(_SPACE, at))

    def after(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """The position after the longest match."""
        while True:
            hit = pattern.match(self.text, at)
            at = hit.end() if hit else at
            if at < len(self.text) or self.is_final:
                return at
            yield

    def fence(self, at: int) -> Reading[int]:
        """Position after the opening of a code fence; -1 without one."""
        if not (yield from self.starts(FENCE, at)):
            return -1
        at = yield from self.after(_WORD, at + len(FENCE))
        return (yield from self.space(at))

    def starts(self, text: str, at: int) -> Reading[bool]:
        """Whether `text` stands at a position."""
        while not self.is_final and len(self.text) - at < len(text):
            if not text.startswith(self.text[at:]):
                return False
            yield
        return self.text.startswith(text, at)

    def literal(self, literal: str, at: int) -> Reading[int | None]:
        """Position after a literal, with any white space; None if absent."""
        for piece in pieces(literal):
            at = yield from self.space(at)
            if piece == COUNT:
                end = yield from self.after(_DIGITS, at)
            else:
                end = yield from self.any_of(quoted_otherwise(piece), at)
            if end == at:
                return None
            at = end
        return at

    def any_of(self, texts: Iterable[str], at: int) -> Reading[int]:
        """Position after the first of some texts; `at` without one."""
        for text in texts:
            if (yield from self.starts(text, at)):
                return at + len(text)
        return at

    def optional(self, literal: str, at: int) -> Reading[int]:
        """The position after as many pieces of a literal as are there."""
        for piece in pieces(literal):
            at = yield from self.passed(piece, at)
        return at

    def passed(self, literal: str, at: int) -> Reading[int]:
        """The position after a whole literal, if it is there."""
        end = yield from self.literal(literal, at)
        return at if end is None else end


def quoted_otherwise(piece: str) -> list[str]:
    """Piece of a tag, also with other quotes or spaces of attributes."""
    if piece[0] == "<" and piece[-1] == "=":
        return [piece, f"{piece[:-1]} ="]
    if not _ATTRIBUTE.fullmatch(piece):
        return [piece]
    others = (piece.replace('"', quote) for quote in ("'", ""))
    return [piece, *(other for other in others if other)]


class WhitespaceTrimmer:
    """Trims leading line breaks, and holds trailing white space back.

    Between two texts the longer of both stays.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open
        self._held = ""
        self._gap: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be emitted now."""
        text = self._held + text
        bare = text if self._is_open else text.lstrip("\r\n")
        emitted = bare.rstrip()
        is_begun = bool(emitted) and not self._is_open
        self._is_open = self._is_open or is_begun
        self._held = bare[len(emitted) :] if self._is_open else text
        if is_begun and self._gap is not None and not emitted[0].isspace():
            return max(self._gap, text[: len(text) - len(bare)], key=len) + emitted
        return emitted

    def finish(self) -> str:
        """Held white space, if after text; then start afresh."""
        held = self._held if self._is_open else ""
        self._held = ""
        self._gap = held if self._is_open else self._gap
        self._is_open = False
        return held
