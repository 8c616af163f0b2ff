"""Readings that the bodies of all call syntaxes share."""

import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.argument_values import ArgumentTypes, CalledArguments, object_of
from mlxstack.text.formats.call_writer import CallWriter, Copier
from mlxstack.text.formats.checked_calls import checked_call
from mlxstack.text.formats.description import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    CallBody,
    CallSyntax,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.text.formats.notations import JSON, Notation
from mlxstack.text.formats.text_feed import FENCE, MarkSet, Reading, TextFeed, quoted_otherwise
from mlxstack.text.formats.value_copier import ValueCopier

MAX_HEAD = 300
"""The most characters between the mark of a call and its arguments."""

QUOTES = ('"',)
MARK_SIGNS = "<[]`"
"""First characters of marks, in place of words, that may follow a call."""

SEPARATORS = (",", ";")
SPACES = (" ", "\n", "\t", "\r")
SLOT = re.compile(r"[^\s<>\"'`{}\[\](),=]+")
_NAME = re.compile(r"[\w.-]*")
_BEGUN_SLOT = re.compile(rf"[\s\"']*(?:{SLOT.pattern})?[\s\"']*")
T = TypeVar("T")


class ReadCalls(Struct, frozen=True):
    """Calls and the position after them.

    `is_closed`: their last mark is there. `is_cut`: the end of the answer cut one more call, which
    was told as far as it came.
    """

    calls: tuple[ToolCall, ...]
    end: int
    is_closed: bool = True
    is_cut: bool = False


class CallParts:
    """Parts of a call in a feed; `writer` tells what becomes certain.

    `closings` are the last marks of a call and of its section, `closing_marks` all of them, and one
    of `ends` follows a call.
    """

    def __init__(
        self, syntax: CallSyntax, feed: TextFeed, types: ArgumentTypes, writer: CallWriter
    ) -> None:
        self.syntax = syntax
        self.feed = feed
        self.types = types
        self.writer = writer
        closes = [one for one in (syntax.section_closes, syntax.closes) if one.strip()]
        self.closings = MarkSet(pieces(one)[-1] for one in closes)
        marks = [one for literal in closes for one in pieces(literal) if is_mark(one)]
        self.closing_marks = [*self.closings.marks, *marks]
        openings = (first_mark(one) for one in (syntax.section_opens, syntax.opens))
        self.ends = MarkSet([*self.closing_marks, *(one for one in openings if is_mark(one))])
        self._head = _head_groups(syntax.body)

    def of(self, syntax: CallSyntax) -> "CallParts":
        """The parts of another syntax in the same feed."""
        return CallParts(syntax, self.feed, self.types, self.writer)

    @property
    def outer_closings(self) -> tuple[str, ...]:
        """The closings that no value holds outside of its text."""
        return tuple(mark for mark in self.closings.marks if is_mark(mark))

    def copied(self, copier: Copier) -> Reading[bool]:
        """Whether all of a value was copied, and told meanwhile."""
        while True:
            copier.read(self.feed.text, is_final=self.feed.is_final)
            self.writer.advance()
            if copier.is_done or copier.is_broken or self.feed.is_final:
                return copier.is_done
            yield

    def object(
        self,
        at: int,
        notation: Notation,
        stops: tuple[str, ...],
        arguments: CalledArguments | None = None,
    ) -> Reading[int]:
        """Copy the arguments of the open call; -1 without an end."""
        copier = ValueCopier(at, notation, stops, arguments=arguments)
        self.writer.copy(copier)
        if not (yield from self.copied(copier)):
            return -1
        self.writer.end()
        return copier.at

    def named(self, fields: dict[str, str], at: int) -> Reading[ReadCalls | None]:
        """Call with a JSON object, maybe fenced, or no arguments."""
        at = yield from self.feed.space(at)
        if (inside := (yield from self.feed.fence(at))) >= 0:
            return (yield from self.unfenced((yield from self._named(fields, inside))))
        return (yield from self._named(fields, at))

    def unfenced(self, read: ReadCalls | None) -> Reading[ReadCalls | None]:
        """Calls with the end of their code fence."""
        if read is None:
            return None
        return replace(read, end=(yield from self.feed.passed(FENCE, read.end)))

    def _named(self, fields: dict[str, str], at: int) -> Reading[ReadCalls | None]:
        feed = self.feed
        arguments: Any = {}
        stops = self.outer_closings
        is_object = yield from feed.starts("{", at)
        if is_object and self.writer.open(fields["name"], fields.get("id", "")):
            end = yield from self.object(at, JSON, stops)
            if end >= 0:
                return ReadCalls(tuple(self.writer.calls), end)
        if is_object or (yield from feed.starts('"', at)):
            end = yield from feed.balanced(at, QUOTES, stops)
            if end < 0:
                return None
            arguments = object_of(feed.text[at:end])
            at = end
        elif at < len(feed.text) and not (yield from self.closes_at(at)):
            return None
        return self.settled(fields, arguments, at)

    def settled(self, fields: dict[str, str], arguments: Any, end: int) -> ReadCalls:
        """A call read as a whole. Raises ValueError if malformed."""
        if self.feed.is_cut and end == len(self.feed.text):
            return ReadCalls((), end, is_closed=False, is_cut=True)
        call = checked_call(fields["name"], fields.get("id"), arguments)
        return ReadCalls(self.writer.settle((call,), end), end)

    def tool_name(self, at: int, sign: str = "") -> Reading[int]:
        """End of an offered tool's name before a sign; -1 without one."""
        end = yield from self.feed.after(_NAME, at)
        is_known = self.types.has(self.feed.text[at:end])
        if is_known and (yield from self.feed.starts(sign, end)):
            return end
        return -1

    def closes_at(self, at: int) -> Reading[bool]:
        """Whether a call ends here: its mark, the section's, or another."""
        syntax = self.syntax
        for literal in (syntax.closes, syntax.section_closes, syntax.opens):
            first, *others = pieces(literal) or [""]
            for mark in (first, *(one for one in others if one[0] in MARK_SIGNS)):
                if mark and (yield from self.feed.literal(mark, at)) is not None:
                    return True
        return not syntax.closes.strip() and not syntax.section_closes.strip()

    def read_head(self, at: int, stops: tuple[str, ...]) -> Reading[tuple[dict[str, str], int]]:
        """Name and id of a call, and their end. Raises ValueError."""
        feed = self.feed
        fields: dict[str, str] = {}
        start = at
        closes = (self.syntax.closes, self.syntax.section_closes)
        last = [*stops, *(pieces(one)[0] for one in closes if one.strip())]
        for group, (literal, slot) in enumerate(self._head):
            if literal:
                inside = yield from feed.literal(literal, at)
                if inside is None and slot in (ID, INDEX):
                    continue
                if inside is None and at == len(feed.text):
                    return fields, at
                if inside is None:
                    raise ValueError("a call has no head")
                at = inside
            if not slot:
                continue
            following = [pieces(one)[0] for one, _ in self._head[group + 1 :] if one.strip()]
            ends = [text for one in following for text in quoted_otherwise(one)]
            is_last = not self._head[-1][0] or self._head[-1][1]
            bounds = MarkSet([*ends, *(last if is_last else ())])
            end = (yield from feed.find(bounds, at, _BEGUN_SLOT)).start
            text = feed.text[at:end].strip().strip("\"'")
            if end - at > MAX_HEAD or not SLOT.fullmatch(text):
                raise ValueError("a call has no head")
            fields[slot.strip("{}")] = text
            at = end
        if "index" in fields and "id" not in fields:
            # The words of the head are the id of such a call.
            opening = next(reversed(pieces(self.syntax.opens)), "")
            head = f"{fields['name']}:{fields['index']}"
            if feed.text[start:at].startswith(head):
                fields["id"] = ("" if is_mark(opening) else opening) + head
        fields["name"] = self.types.name(fields["name"])
        return fields, at


def _head_groups(body: CallBody) -> list[tuple[str, str]]:
    """Literals between a call's mark and arguments, with following slots."""
    parts = [part for part in getattr(body, "parts", (NAME,)) if part != ARGUMENTS]
    groups: list[tuple[str, str]] = []
    literal = ""
    for part in parts:
        if part in (NAME, ID, INDEX):
            groups.append((literal, part))
            literal = ""
        else:
            literal = part
    return [*groups, (literal, "")] if literal.strip() else groups


def watched(reading: Reading[T], on_pause: Callable[[], None]) -> Reading[T]:
    """A reading that calls `on_pause` whenever it needs more text."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return cast("T", end.value)
        on_pause()
        yield
