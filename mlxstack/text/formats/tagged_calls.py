"""Reads calls whose arguments stand between tags."""

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.text.formats.argument_values import (
    ANY,
    UNDECODABLE,
    argument_value,
    is_surely_text,
    object_of,
)
from mlxstack.text.formats.call_parts import (
    MAX_HEAD,
    QUOTES,
    SLOT,
    SPACES,
    CallParts,
    ReadCalls,
    watched,
)
from mlxstack.text.formats.call_writer import BoundCopy, Copier, TextCopier
from mlxstack.text.formats.checked_calls import UNREADABLE
from mlxstack.text.formats.description import KEY, TYPE, TaggedBody, first_mark, pieces
from mlxstack.text.formats.nested_tags import NestedTags, TypedPlace, scalar
from mlxstack.text.formats.text_feed import FENCE, FoundMark, MarkSet, Reading, quoted_otherwise
from mlxstack.text.formats.value_copier import ValueCopier
from mlxstack.text.schema_types import SchemaTypes

MIN_MARK = 3
"""The least characters of a mark that opens arguments and may end a value."""

_KEY = re.compile(r"[^\s<>/][^<>]*")


class Argument(Struct, frozen=True):
    """Argument of the tool `name`, whose value is at `at`.

    `is_text` if the call writes its type; None where it writes none.
    """

    name: str
    key: str
    at: int
    types: SchemaTypes
    is_text: bool | None = None


class TaggedCalls:
    """Reads calls of a tagged body."""

    def __init__(self, parts: CallParts, body: TaggedBody) -> None:
        self._parts = parts
        self._body = body
        self._feed = parts.feed
        self._syntax = parts.syntax
        self._types = parts.types
        self._writer = parts.writer
        self._nested = NestedTags(parts.feed, body)
        self._block = _json_block(body)
        self._next = _next_opening(body)
        opening = next((one for one in reversed(pieces(parts.syntax.opens)) if "<" in one), "")
        self._opening = opening if self._next else ""
        self._given: set[str] = set()

    def read(self, at: int) -> Reading[ReadCalls | None]:
        """One call, from its name to its last argument."""
        feed = self._feed
        body = self._body
        opening = first_mark(body.argument_opens)
        at = at if opening else (yield from feed.space(at))
        stops = (opening, "{", FENCE, first_mark(body.value_closes)) if opening else SPACES
        fields, at = yield from self._parts.read_head(at, stops)
        at = yield from feed.passed(body.value_closes, at)
        if (inside := (yield from self._object_at(at))) >= 0:
            return (yield from self._object(fields, inside))
        arguments: dict[str, Any] = {}
        self._given = set()
        while True:
            start = yield from feed.literal(body.argument_opens, at)
            if start is None or (not opening and (yield from self._ends_pairs(at))):
                break
            argument = yield from self._argument(fields["name"], start)
            if argument is None or not argument.key:
                break
            self._given.add(argument.key)
            self._writer.open(fields["name"], fields.get("id", ""))
            value, at = yield from self._value(argument)
            arguments.setdefault(argument.key, value)
        is_cut = feed.is_cut and self._writer.is_open
        if (is_cut or at < len(feed.text)) and not (yield from self._parts.closes_at(at)):
            return None
        if self._writer.is_open:
            return ReadCalls((self._writer.end(),), at)
        return self._parts.settled(fields, arguments, at)

    def _object_at(self, at: int) -> Reading[int]:
        """Position of a JSON object in place of tags; -1 without one."""
        feed = self._feed
        at = yield from feed.space(at)
        if (yield from feed.any_of(("{", FENCE), at)) > at:
            return at
        inside = (yield from feed.literal(self._block[0], at)) if self._block[0] else None
        if inside is None:
            return -1
        mark = yield from feed.find(MarkSet(["{"]), inside)
        if not mark.text or mark.start - inside > MAX_HEAD:
            return -1
        return mark.start

    def _object(self, fields: dict[str, str], at: int) -> Reading[ReadCalls | None]:
        """Call whose arguments are a JSON object, maybe in a block."""
        read = yield from self._parts.named(fields, at)
        if read is None or not self._block[1]:
            return read
        return replace(read, end=(yield from self._feed.passed(self._block[1], read.end)))

    def _argument(self, name: str, at: int) -> Reading[Argument | None]:
        """Key of an argument, maybe ""; None if no value follows."""
        feed = self._feed
        body = self._body
        before, _, after = body.value_opens.partition(TYPE)
        key_end = MarkSet(one for piece in pieces(before) for one in quoted_otherwise(piece))
        mark = yield from feed.find(key_end, at)
        if not mark.text or mark.start - at > MAX_HEAD:
            return None
        key = feed.text[at : mark.start].strip().strip("\"'")
        if not (_KEY if first_mark(body.argument_opens) else SLOT).fullmatch(key):
            return Argument(name, "", at, ANY)
        inside = yield from feed.literal(before, mark.start)
        if inside is None and TYPE not in body.value_opens:
            # One of the marks is left out now and then.
            inside = yield from feed.space((yield from feed.optional(before, mark.start)))
        is_text = None
        if inside is not None and TYPE in body.value_opens:
            stop = yield from feed.find(MarkSet(quoted_otherwise(pieces(after)[0])), inside)
            kind = feed.text[inside : stop.start]
            is_text = kind == dict(body.types).get("string") if kind else None
            inside = yield from feed.literal(after, stop.start)
        types = self._types.of(name, key)
        if inside is None:
            return None
        return Argument(name, key, inside, types, is_text)

    def _argument_copier(self, argument: Argument, at: int) -> Copier:
        types = argument.types
        if argument.is_text:
            return TextCopier(at, bool)
        if argument.is_text is None and types.texts and not self._body.has_json_text:
            return TextCopier(at, lambda begun: is_surely_text(begun, types))
        # A number in quotes is a number.
        return ValueCopier(at, has_scalars=False, has_texts=bool(types.texts))

    def _value(self, argument: Argument) -> Reading[tuple[Any, int]]:
        """Value of an argument, and the position after its closing marks."""
        body = self._body
        at = argument.at
        if body.item:
            place = TypedPlace(argument.types, self._types.root(argument.name))
            if (yield from self._nested.begins(at, place)):
                return (yield from self._container(place, argument))
        if not body.value_closes:
            return (yield from self._json_value(argument))
        # White space of the template is no part of the value.
        space = body.value_opens[len(body.value_opens.rstrip()) :]
        at = yield from self._feed.any_of([space], at)
        closing = body.value_closes.strip().replace(KEY, argument.key)
        copier = self._argument_copier(argument, at)
        self._writer.begin_value(argument.key, copier)
        ends = MarkSet([closing, self._next, self._opening, *self._parts.ends.marks])
        copy = BoundCopy(self._feed, self._writer, copier, ends)
        mark = yield from self._closing_of(closing, argument, at, copy)
        if mark is None:
            copy.advance()
            mark = self._missing_closing(argument, at)
        if mark is None:
            raise ValueError(f"nothing closes {argument.key}")
        closes = body.value_closes
        text = self._feed.text[at : mark.start]
        text = text.removesuffix(closes[: len(closes) - len(closes.lstrip())])
        value = self._told(argument, text)
        self._writer.end_value(value, at + len(text), mark.end)
        return value, mark.end

    def _container(self, place: TypedPlace, argument: Argument) -> Reading[tuple[Any, int]]:
        """Object or list of nested tags, written as a whole."""
        self._writer.begin_value(argument.key, None)
        value, end = yield from self._nested.container(argument.key, argument.at, place)
        self._writer.end_value(value, end, end)
        return value, end

    def _missing_closing(self, argument: Argument, at: int) -> FoundMark | None:
        """End of an offered tool's call, in place of a closing mark."""
        feed = self._feed
        if not self._types.has(argument.name) or feed.is_cut:
            return None
        mark = MarkSet(self._parts.closing_marks).search(feed.text, at, is_final=True)
        return self._before_call(at, len(feed.text) if mark is None else mark.start)

    def _closing_of(
        self, closing: str, argument: Argument, at: int, copy: BoundCopy
    ) -> Reading[FoundMark | None]:
        """Mark that ends a value; the rest of the call follows.

        Another argument or call ends a value that nothing closes.
        """
        marks = MarkSet([closing, self._next, self._opening, "<![CDATA[", "]]>"])
        first: FoundMark | None = None
        is_data = False
        scan = at
        while True:
            mark = yield from watched(self._feed.find(marks, scan), copy.advance)
            if not mark.text:
                return first
            scan = mark.end
            if mark.text == self._next:
                if not is_data and (yield from self._is_next(argument, mark.start, copy)):
                    return FoundMark(at + len(self._feed.text[at : mark.start].rstrip()))
                continue
            if mark.text == self._opening:
                if is_data or not (yield from self._begins_call(mark.start)):
                    continue
                outer = yield from self._enclosing(closing, mark.end)
                if outer is None:
                    if self._feed.is_cut:
                        return first
                    return self._before_call(at, mark.start)
                mark = outer
                scan = outer.end
            if mark.text != closing:
                is_data = mark.text == "<![CDATA[" and (is_data or mark.start == at)
                continue
            first = first or mark
            if not is_data and (yield from self._ends_value(mark.end)):
                return mark

    def _begins_call(self, at: int) -> Reading[bool]:
        """Whether a call of an offered tool with an argument opens here."""
        feed = self._feed
        opens = self._syntax.opens
        start = yield from feed.literal(opens[opens.rfind(self._opening) :], at)
        if start is None or (yield from self._parts.tool_name(start)) < 0:
            return False
        try:
            _, end = yield from self._parts.read_head(start, (self._next,))
        except UNREADABLE:
            return False
        return (yield from feed.literal(self._next, end)) is not None

    def _enclosing(self, closing: str, at: int) -> Reading[FoundMark | None]:
        """Mark that closes a value in which calls are quoted."""
        bounds = MarkSet([closing, self._next])
        depth = 0
        while (mark := (yield from self._feed.find(bounds, at))).text:
            depth = depth + (1 if mark.text == self._next else -1)
            at = mark.end
            if depth < 0:
                return mark
        return None

    def _before_call(self, at: int, end: int) -> FoundMark:
        """End of a value before the marks between two calls."""
        syntax = self._syntax
        text = self._feed.text[at:end].rstrip()
        between = f"{syntax.closes} {syntax.section_closes} {syntax.section_opens} {syntax.opens}"
        for piece in reversed(pieces(between)):
            text = text.removesuffix(piece).rstrip()
        return FoundMark(at + len(text))

    def _is_next(self, argument: Argument, at: int, copy: BoundCopy) -> Reading[bool]:
        """Whether another argument opens here, and not inside a text."""
        start = yield from self._feed.literal(self._body.argument_opens, at)
        following = None
        if start is not None:
            following = yield from self._argument(argument.name, start)
        if following is None or following.key in self._given:
            return False
        if not self._types.declares(argument.name, following.key):
            return False
        closing = self._body.value_closes.strip()
        marks = MarkSet([closing, *self._parts.closing_marks])
        mark = yield from watched(self._feed.find(marks, following.at), copy.advance)
        if mark.text != closing:
            return True
        return (yield from self._ends_value(mark.end))

    def _json_value(self, argument: Argument) -> Reading[tuple[Any, int]]:
        """A value of JSON that nothing closes."""
        at = yield from self._feed.space(argument.at)
        copier = self._argument_copier(argument, at)
        self._writer.begin_value(argument.key, copier)
        yield from self._parts.copied(copier)
        end = copier.at if copier.is_done else (yield from self._json_end(at))
        if end <= at:
            raise ValueError(f"{argument.key} has no value")
        value = self._typed(argument, self._feed.text[at:end])
        self._writer.end_value(value, end, end)
        return value, end

    def _json_end(self, at: int) -> Reading[int]:
        feed = self._feed
        if (yield from feed.any_of('"{[', at)) > at:
            return (yield from feed.balanced(at, QUOTES, ()))
        closes = (self._syntax.closes, self._syntax.section_closes)
        ends = [pieces(one)[0] for one in closes if one.strip()]
        return (yield from feed.find(MarkSet([*SPACES, *ends]), at)).start

    def _ends_pairs(self, at: int) -> Reading[bool]:
        """Whether no other argument can follow."""
        at = yield from self._feed.space(at)
        return at == len(self._feed.text) or (yield from self._parts.closes_at(at))

    def _ends_value(self, at: int) -> Reading[bool]:
        """Whether the next argument, the call's end or the text's follows."""
        following = yield from self._feed.literal(self._body.argument_opens, at)
        return following is not None or (yield from self._ends_pairs(at))

    def _told(self, argument: Argument, text: str) -> Any:
        """Value of an argument; its text if unreadable in an open call.

        Raises what `_typed` raises.
        """
        try:
            return self._typed(argument, text)
        except UNREADABLE:
            if self._writer.is_open:
                return text
            raise

    def _typed(self, argument: Argument, text: str) -> Any:
        types = argument.types
        if argument.is_text:
            return text
        if argument.is_text is False or self._body.has_json_text:
            return _json_or_text(text, types)
        if self._body.item:
            return scalar(text, types)
        return argument_value(text, types)


def _next_opening(body: TaggedBody) -> str:
    """Mark of an argument that no text is likely to hold."""
    mark = first_mark(body.argument_opens)
    is_text = body.value_closes.strip() and not body.has_json_text
    is_certain = is_text and KEY not in body.value_closes and len(mark) >= MIN_MARK
    return mark if is_certain else ""


def _json_block(body: TaggedBody) -> tuple[str, str]:
    """Tags of a block of JSON, with the word `json` for an argument's."""
    mark = first_mark(body.argument_opens)
    word = re.match(r"\w+", body.argument_opens.strip().removeprefix(mark)) if mark else None
    if word is None or word[0] not in body.value_closes:
        return "", ""
    return f"{mark}json", body.value_closes.strip().replace(word[0], "json")


def _json_or_text(text: str, types: SchemaTypes) -> Any:
    try:
        value = object_of(text.strip())
    except UNDECODABLE:
        return text
    is_quoted = isinstance(value, str) and not types.texts
    return argument_value(text, types) if is_quoted else value
