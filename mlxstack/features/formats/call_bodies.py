"""Readers of calls whose arguments are one value."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.features.formats.argument_values import ArgumentTypes, object_of
from mlxstack.features.formats.call_writer import CallWriter, Copier
from mlxstack.features.formats.checked_calls import (
    UNREADABLE,
    checked_call,
    parse_calls,
    tool_schemas,
)
from mlxstack.features.formats.notations import (
    JSON,
    PYTHON,
    GemmaArguments,
    Notation,
    PythonArguments,
    TypedArguments,
    gemma_notation,
)
from mlxstack.features.formats.syntax import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    CallSyntax,
    GemmaBody,
    PublishedBody,
    PythonBody,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.features.formats.text_feed import FENCE, MarkSet, Reading, TextFeed, quoted_otherwise
from mlxstack.features.formats.values import ValueCopier

MAX_HEAD = 300
"""The most characters between the mark of a call and its arguments."""

MARK_SIGNS = "<[]`"
"""First characters of marks, in place of words, that may follow a call."""

SEPARATORS = (",", ";")
SLOT = re.compile(r"[^\s<>\"'`{}\[\](),=]+")
_TOOL_NAME = re.compile(r"[\w.-]*")
_BEGUN_SLOT = re.compile(rf"[\s\"']*(?:{SLOT.pattern})?[\s\"']*")
_KEYWORD = re.compile(r"[\w$-]*")
_SEPARATORS = re.compile(r"[\s,]*")


class ReadCalls(Struct, frozen=True):
    """Calls and the position after them."""

    calls: tuple[ToolCall, ...]
    end: int
    is_closed: bool = True
    """Whether their last mark is there."""

    is_cut: bool = False
    """Whether the end of the answer cut one more call, which was told as far as it came."""


class CallContext(Struct, frozen=True):
    """The text of an answer, and what is known of its calls."""

    feed: TextFeed
    types: ArgumentTypes
    tools: tuple[Tool, ...]
    writer: CallWriter
    """Tells what becomes certain."""


class BodyReader:
    """Reads the calls of one node of a syntax."""

    def __init__(self, syntax: CallSyntax, context: CallContext) -> None:
        self.syntax = syntax
        self.context = context
        self.feed = context.feed
        self.types = context.types
        self.writer = context.writer
        self.closings = MarkSet(pieces(literal)[-1] for literal in syntax.closings)
        self.outer_closings = tuple(mark for mark in self.closings.marks if is_mark(mark))
        """Closings that no value holds outside of its text."""

        all_pieces = (piece for literal in syntax.closings for piece in pieces(literal))
        self.closing_marks = [*self.closings.marks, *filter(is_mark, all_pieces)]
        openings = (first_mark(literal) for literal in (syntax.section_opens, syntax.opens))
        self.ends = MarkSet([*self.closing_marks, *(mark for mark in openings if is_mark(mark))])
        """Marks that follow a call."""

        self._head = _head_groups(syntax.body.parts)

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        """Calls at a position; None without any. Raises what `UNREADABLE` names."""
        raise NotImplementedError

    def copied(self, copier: Copier) -> Reading[bool]:
        """Whether all of a value was copied, and told meanwhile."""
        while True:
            copier.read(self.feed.text, is_final=self.feed.is_final)
            self.writer.advance()
            if copier.is_done or copier.is_broken or self.feed.is_final:
                return copier.is_done
            yield

    def value_call(
        self,
        fields: dict[str, str],
        offset: int,
        notation: Notation = JSON,
        arguments: TypedArguments | None = None,
        *,
        is_told: bool = True,
        stops: tuple[str, ...] | None = None,
    ) -> Reading[ReadCalls | None]:
        """Call whose arguments are one value."""
        if stops is None:
            stops = self.outer_closings
        copier = ValueCopier(offset, notation, stops, arguments=arguments)
        if is_told and self.writer.open(fields["name"], fields.get("id", "")):
            self.writer.copy(copier)
        if not (yield from self.copied(copier)):
            return None
        if self.writer.is_open:
            return ReadCalls((self.writer.end(),), copier.offset)
        return self.whole_call(fields, copier.value(), copier.offset)

    def whole_call(self, fields: dict[str, str], arguments: Any, end: int) -> ReadCalls:
        """A call read as a whole. Raises ValueError if malformed."""
        if self.feed.is_cut and end == len(self.feed.text):
            return ReadCalls((), end, is_closed=False, is_cut=True)
        return ReadCalls((checked_call(fields["name"], fields.get("id"), arguments),), end)

    def object_call(self, fields: dict[str, str], offset: int) -> Reading[ReadCalls | None]:
        """Call with a JSON object, maybe fenced, or without arguments."""
        feed = self.feed
        start = yield from feed.space(offset)
        inside = yield from feed.fence(start)
        offset = start if inside < 0 else inside
        arguments: Any = {}
        if (yield from feed.starts("{", offset)):
            call = yield from self.value_call(fields, offset)
        elif (yield from feed.starts('"', offset)):
            copier = ValueCopier(offset, has_scalars=False)
            arguments = copier.value() if (yield from self.copied(copier)) else None
            call = self.whole_call(fields, arguments, copier.offset)
        elif offset < len(feed.text) and not (yield from self.closes_at(offset)):
            call = None
        else:
            call = self.whole_call(fields, arguments, offset)
        if call is None or inside < 0:
            return call
        return replace(call, end=(yield from feed.passed(FENCE, call.end)))

    def tool_name(self, offset: int, sign: str = "") -> Reading[int]:
        """End of an offered tool's name before a sign; -1 without one."""
        end = yield from self.feed.after(_TOOL_NAME, offset)
        is_known = self.types.has(self.feed.text[offset:end])
        if is_known and (yield from self.feed.starts(sign, end)):
            return end
        return -1

    def closes_at(self, offset: int) -> Reading[bool]:
        """Whether a call ends here: its mark, the section's, or another."""
        syntax = self.syntax
        for literal in (syntax.closes, syntax.section_closes, syntax.opens):
            first, *more = pieces(literal) or [""]
            for mark in (first, *(piece for piece in more if piece[0] in MARK_SIGNS)):
                if mark and (yield from self.feed.literal(mark, offset)) is not None:
                    return True
        return not syntax.closings

    def read_head(self, offset: int, stops: tuple[str, ...]) -> Reading[tuple[dict[str, str], int]]:
        """Name and id of a call, and their end. Raises ValueError."""
        feed = self.feed
        fields: dict[str, str] = {}
        start = offset
        last = [*stops, *(pieces(literal)[0] for literal in self.syntax.closings)]
        for group, (literal, slot) in enumerate(self._head):
            if literal:
                inside = yield from feed.literal(literal, offset)
                if inside is None and slot in (ID, INDEX):
                    continue
                if inside is None and offset == len(feed.text):
                    return fields, offset
                if inside is None:
                    raise ValueError("a call has no head")
                offset = inside
            if not slot:
                continue
            following = [pieces(text)[0] for text, _ in self._head[group + 1 :] if text.strip()]
            ends = [text for mark in following for text in quoted_otherwise(mark)]
            is_last = not self._head[-1][0] or self._head[-1][1]
            bounds = MarkSet([*ends, *(last if is_last else ())])
            end = (yield from feed.find(bounds, offset, _BEGUN_SLOT)).start
            text = feed.text[offset:end].strip().strip("\"'")
            if end - offset > MAX_HEAD or not SLOT.fullmatch(text):
                raise ValueError("a call has no head")
            fields[slot.strip("{}")] = text
            offset = end
        if "index" in fields and "id" not in fields:
            # The words of the head are the id of such a call.
            opening = next(reversed(pieces(self.syntax.opens)), "")
            head = f"{fields['name']}:{fields['index']}"
            if feed.text[start:offset].startswith(head):
                fields["id"] = ("" if is_mark(opening) else opening) + head
        fields["name"] = self.types.name(fields["name"])
        return fields, offset


def _head_groups(written: Iterable[str]) -> list[tuple[str, str]]:
    """Literals between a call's mark and arguments, with following slots."""
    groups: list[tuple[str, str]] = []
    literal = ""
    for part in written:
        if part in (NAME, ID, INDEX):
            groups.append((literal, part))
            literal = ""
        elif part != ARGUMENTS:
            literal = part
    if literal.strip():
        return [*groups, (literal, "")]
    return groups


class NamedReader(BodyReader):
    """Reads a name, then the arguments as JSON."""

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        fields, start = yield from self.read_head(offset, ("{", FENCE))
        return (yield from self.object_call(fields, start))

    def message(self, name: str, offset: int, ends: tuple[str, ...]) -> Reading[ReadCalls]:
        """Call whose arguments are a message, up to one of `ends`."""
        feed = self.feed
        writer = self.writer
        start = yield from feed.space(offset)
        call = None
        if (yield from feed.starts("{", start)):
            with suppress(*UNREADABLE):
                call = yield from self.value_call({"name": name}, start, stops=ends)
        mark = yield from feed.find(MarkSet(ends), offset if call is None else call.end)
        stop = mark.start
        if feed.is_cut and not (mark.text or writer.calls):
            if writer.is_open:
                writer.cut()
            return ReadCalls((), stop, is_closed=False, is_cut=True)
        calls = writer.close(stop)
        if not calls:
            with suppress(ValueError):
                arguments = object_of(feed.text[offset:stop].strip() or "{}")
                calls = (checked_call(name, None, arguments),)
        return ReadCalls(calls, stop, bool(mark.text))


class GemmaReader(BodyReader):
    """Reads `call:name{key:value}`."""

    def __init__(self, syntax: CallSyntax, context: CallContext) -> None:
        super().__init__(syntax, context)
        assert isinstance(syntax.body, GemmaBody)
        self._heads = syntax.body.heads
        self._notation = gemma_notation(syntax.body.quote)
        self._head = _head_groups((NAME,))

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        feed = self.feed
        offset = yield from feed.any_of(self._heads, (yield from feed.space(offset)))
        fields, start = yield from self.read_head(offset, ("{",))
        if (yield from feed.starts("{", start)):
            arguments = GemmaArguments(self.types, fields["name"])
            return (yield from self.value_call(fields, start, self._notation, arguments))
        if (yield from self.closes_at(start)):
            return self.whole_call(fields, {}, start)
        return None


class PythonReader(BodyReader):
    """Reads Python calls, in a list or one after the other."""

    def __init__(self, syntax: CallSyntax, context: CallContext) -> None:
        super().__init__(syntax, context)
        assert isinstance(syntax.body, PythonBody)
        self._body = syntax.body

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        feed = self.feed
        offset = yield from feed.space(offset)
        is_list = yield from feed.starts("[", offset)
        if self._body.is_list and not is_list and self.syntax.is_bare:
            return None
        calls: tuple[ToolCall, ...] = ()
        offset += is_list
        while True:
            start = yield from feed.after(_SEPARATORS, offset)
            if is_list and (yield from feed.starts("]", start)):
                if calls:
                    return ReadCalls(calls, start + 1)
                return None
            name_end = yield from feed.after(_TOOL_NAME, start)
            is_call = name_end > start and (yield from feed.starts("(", name_end))
            if not is_call:
                if calls and not is_list:
                    return ReadCalls(calls, offset)
                return None
            fields = {"name": feed.text[start:name_end]}
            arguments = PythonArguments(self.types, fields["name"], self._body)
            # A call whose arguments have no names is told as a whole.
            is_told = len(calls) == len(self.writer.calls)
            is_told = is_told and (yield from self._is_named(name_end + 1))
            call = yield from self.value_call(fields, name_end, PYTHON, arguments, is_told=is_told)
            if call is None or call.is_cut:
                return call
            calls = (*calls, *call.calls)
            offset = call.end

    def _is_named(self, offset: int) -> Reading[bool]:
        """Whether arguments begin with a name, or there are none."""
        feed = self.feed
        start = yield from feed.space(offset)
        end = yield from feed.after(_KEYWORD, start)
        sign = ")"
        if end > start:
            sign = "="
        return (yield from feed.starts(sign, (yield from feed.space(end))))


class PublishedReader(BodyReader):
    """Reads calls by a parser of mlx-lm."""

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        body = self.syntax.body
        assert isinstance(body, PublishedBody)
        end = (yield from self.feed.find(self.closings, offset)).start
        schemas = tool_schemas(self.context.tools)
        calls = parse_calls(body.parser, self.feed.text[offset:end], schemas)
        if calls:
            return ReadCalls(calls, end)
        return None
