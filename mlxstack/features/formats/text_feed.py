"""Text feed: incremental searches in streamed text, and white space trimming.

The searches are generators: one that yields cannot decide yet, and goes on with more text. Each
result depends on the whole text alone, never on how it was cut.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from msgspec import Struct

from mlxstack.features.formats.syntax import COUNT, pieces

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

    def search(self, text: str, offset: int, *, is_final: bool) -> FoundMark | None:
        """First mark from `offset`; None while more text may change it."""
        hit = self._pattern.search(text, offset)
        if hit is not None and (is_final or hit.start() < self.hold(text, offset)):
            return FoundMark(hit.start(), hit[0])
        return None

    def hold(self, text: str, offset: int) -> int:
        """Start of the text that may become a mark."""
        for start in range(max(offset, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                ending = text[start:]
                if any(len(mark) > len(ending) and mark.startswith(ending) for mark in self.marks):
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
        self, marks: MarkSet, offset: int, within: re.Pattern[str] | None = None
    ) -> Reading[FoundMark]:
        """First mark after `offset`, or none at the end of the text.

        All text before it has to match `within`.
        """
        start = offset
        while True:
            mark = marks.search(self.text, offset, is_final=self.is_final)
            if mark is not None:
                return mark
            offset = max(offset, marks.hold(self.text, offset))
            is_within = within is None or within.fullmatch(self.text, start, offset)
            if self.is_final or not is_within:
                return FoundMark(len(self.text))
            yield

    def space(self, offset: int) -> Reading[int]:
        """The position after white space."""
        return (yield from self.after(_SPACE, offset))

    def after(self, pattern: re.Pattern[str], offset: int) -> Reading[int]:
        """The position after the longest match."""
        while True:
            hit = pattern.match(self.text, offset)
            if hit:
                offset = hit.end()
            if offset < len(self.text) or self.is_final:
                return offset
            yield

    def fence(self, offset: int) -> Reading[int]:
        """Position after the opening of a code fence; -1 without one."""
        if not (yield from self.starts(FENCE, offset)):
            return -1
        offset = yield from self.after(_WORD, offset + len(FENCE))
        return (yield from self.space(offset))

    def starts(self, text: str, offset: int) -> Reading[bool]:
        """Whether `text` stands at a position."""
        while not self.is_final and len(self.text) - offset < len(text):
            if not text.startswith(self.text[offset:]):
                return False
            yield
        return self.text.startswith(text, offset)

    def literal(self, literal: str, offset: int) -> Reading[int | None]:
        """Position after a literal, with any white space; None if absent."""
        for piece in pieces(literal):
            offset = yield from self.space(offset)
            if piece == COUNT:
                end = yield from self.after(_DIGITS, offset)
            else:
                end = yield from self.any_of(quoted_otherwise(piece), offset)
            if end == offset:
                return None
            offset = end
        return offset

    def any_of(self, texts: Iterable[str], offset: int) -> Reading[int]:
        """Position after the first of some texts; `offset` without one."""
        for text in texts:
            if (yield from self.starts(text, offset)):
                return offset + len(text)
        return offset

    def optional(self, literal: str, offset: int) -> Reading[int]:
        """The position after as many pieces of a literal as are there."""
        for piece in pieces(literal):
            offset = yield from self.passed(piece, offset)
        return offset

    def passed(self, literal: str, offset: int) -> Reading[int]:
        """The position after a whole literal, if it is there."""
        end = yield from self.literal(literal, offset)
        if end is None:
            return offset
        return end


def quoted_otherwise(piece: str) -> list[str]:
    """Piece of a tag, also with other quotes or spaces of attributes."""
    if piece[0] == "<" and piece[-1] == "=":
        return [piece, f"{piece[:-1]} ="]
    if not _ATTRIBUTE.fullmatch(piece):
        return [piece]
    spellings = (piece.replace('"', quote) for quote in ("'", ""))
    return [piece, *(spelling for spelling in spellings if spelling)]


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
        held = ""
        if self._is_open:
            held = self._held
        self._held = ""
        if self._is_open:
            self._gap = held
        self._is_open = False
        return held
