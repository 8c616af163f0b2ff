"""Reads calls whose arguments stand between tags."""

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.features.formats.argument_values import (
    ANY,
    UNDECODABLE,
    argument_value,
    is_surely_text,
    object_of,
    type_names,
)
from mlxstack.features.formats.call_bodies import MAX_HEAD, SLOT, BodyReader, CallContext, ReadCalls
from mlxstack.features.formats.call_writer import Copier, TextCopier
from mlxstack.features.formats.checked_calls import UNREADABLE
from mlxstack.features.formats.notations import CONTAINERS
from mlxstack.features.formats.syntax import KEY, TYPE, CallSyntax, TaggedBody, first_mark, pieces
from mlxstack.features.formats.text_feed import (
    FENCE,
    FoundMark,
    MarkSet,
    Reading,
    TextFeed,
    quoted_otherwise,
)
from mlxstack.features.formats.values import ValueCopier
from mlxstack.text.schema_types import Schema, SchemaTypes, joined_types, schema_types

MIN_MARK = 3
"""The least characters of a mark that opens arguments and may end a value."""

MAX_NESTED = 32
"""Containers of nested tags around a value."""

SPACES = (" ", "\n", "\t", "\r")
CDATA_OPENS = "<![CDATA["
CDATA_CLOSES = "]]>"
_KEY = re.compile(r"[^\s<>/][^<>]*")


class Argument(Struct, frozen=True):
    """Argument of the tool `name`, whose value is at `offset`."""

    name: str
    key: str
    offset: int
    types: SchemaTypes
    is_text: bool | None = None
    """Type that the call writes; None where it writes none."""


class TaggedReader(BodyReader):
    """Reads calls of a tagged body."""

    def __init__(self, syntax: CallSyntax, context: CallContext) -> None:
        super().__init__(syntax, context)
        assert isinstance(syntax.body, TaggedBody)
        self._body = syntax.body
        self._nested = NestedTags(self.feed, self._body)
        self._block = _json_block(self._body)
        self._next = _next_opening(self._body)
        opening = next((piece for piece in reversed(pieces(syntax.opens)) if "<" in piece), "")
        self._opening = opening if self._next else ""
        self._read_keys: set[str] = set()

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        """One call, from its name to its last argument."""
        feed = self.feed
        body = self._body
        opening = first_mark(body.argument_opens)
        if not opening:
            offset = yield from feed.space(offset)
        stops = (opening, "{", FENCE, first_mark(body.value_closes)) if opening else SPACES
        fields, offset = yield from self.read_head(offset, stops)
        offset = yield from feed.passed(body.value_closes, offset)
        if (inside := (yield from self._object_at(offset))) >= 0:
            return (yield from self._object(fields, inside))
        arguments: dict[str, Any] = {}
        self._read_keys = set()
        while True:
            start = yield from feed.literal(body.argument_opens, offset)
            if start is None or (not opening and (yield from self._ends_pairs(offset))):
                break
            argument = yield from self._argument(fields["name"], start)
            if argument is None or not argument.key:
                break
            self._read_keys.add(argument.key)
            self.writer.open(fields["name"], fields.get("id", ""))
            value, offset = yield from self._value(argument)
            arguments.setdefault(argument.key, value)
        is_cut = feed.is_cut and self.writer.is_open
        if (is_cut or offset < len(feed.text)) and not (yield from self.closes_at(offset)):
            return None
        if self.writer.is_open:
            return ReadCalls((self.writer.end(),), offset)
        return self.whole_call(fields, arguments, offset)

    def _object_at(self, offset: int) -> Reading[int]:
        """Position of a JSON object in place of tags; -1 without one."""
        feed = self.feed
        offset = yield from feed.space(offset)
        if (yield from feed.any_of(("{", FENCE), offset)) > offset:
            return offset
        inside = (yield from feed.literal(self._block[0], offset)) if self._block[0] else None
        if inside is None:
            return -1
        mark = yield from feed.find(MarkSet(["{"]), inside)
        if not mark.text or mark.start - inside > MAX_HEAD:
            return -1
        return mark.start

    def _object(self, fields: dict[str, str], offset: int) -> Reading[ReadCalls | None]:
        """Call whose arguments are a JSON object, maybe in a block."""
        call = yield from self.object_call(fields, offset)
        if call is None or not self._block[1]:
            return call
        return replace(call, end=(yield from self.feed.passed(self._block[1], call.end)))

    def _argument(self, name: str, offset: int) -> Reading[Argument | None]:
        """Key of an argument, maybe ""; None if no value follows."""
        feed = self.feed
        body = self._body
        before, _, after = body.value_opens.partition(TYPE)
        key_end = MarkSet(text for piece in pieces(before) for text in quoted_otherwise(piece))
        mark = yield from feed.find(key_end, offset)
        if not mark.text or mark.start - offset > MAX_HEAD:
            return None
        key = feed.text[offset : mark.start].strip().strip("\"'")
        if not (_KEY if first_mark(body.argument_opens) else SLOT).fullmatch(key):
            return Argument(name, "", offset, ANY)
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
        if inside is None:
            return None
        return Argument(name, key, inside, self.types.of(name, key), is_text)

    def _value(self, argument: Argument) -> Reading[tuple[Any, int]]:
        """Value of an argument, and the position after its closing marks."""
        body = self._body
        offset = argument.offset
        if body.item:
            place = TypedPlace(argument.types, self.types.root(argument.name))
            if (yield from self._nested.begins(offset, place)):
                self.writer.begin_value(argument.key, None)
                value, end = yield from self._nested.container(argument.key, offset, place)
                self.writer.end_value(value, end, end)
                return value, end
        if not body.value_closes:
            return (yield from self._json_value(argument))
        # White space of the template is no part of the value.
        space = body.value_opens[len(body.value_opens.rstrip()) :]
        offset = yield from self.feed.any_of([space], offset)
        closing = body.value_closes.strip().replace(KEY, argument.key)
        ends = MarkSet([closing, self._next, self._opening, *self.ends.marks])
        self.writer.begin_value(argument.key, self._copier(argument, offset), ends)
        mark = yield from self._closing_of(closing, argument, offset)
        if mark is None:
            self.writer.advance()
            mark = self._missing_closing(argument, offset)
        if mark is None:
            raise ValueError(f"nothing closes {argument.key}")
        closes = body.value_closes
        text = self.feed.text[offset : mark.start]
        text = text.removesuffix(closes[: len(closes) - len(closes.lstrip())])
        value = self._readable(argument, text)
        self.writer.end_value(value, offset + len(text), mark.end)
        return value, mark.end

    def _copier(self, argument: Argument, offset: int) -> Copier:
        types = argument.types
        if argument.is_text:
            return TextCopier(offset, bool)
        if argument.is_text is None and types.texts and not self._body.has_json_text:
            return TextCopier(offset, lambda begun: is_surely_text(begun, types))
        # A number in quotes is a number.
        return ValueCopier(offset, has_scalars=False, has_texts=bool(types.texts))

    def _json_value(self, argument: Argument) -> Reading[tuple[Any, int]]:
        """A value of JSON that nothing closes."""
        feed = self.feed
        offset = yield from feed.space(argument.offset)
        copier = self._copier(argument, offset)
        self.writer.begin_value(argument.key, copier)
        if (yield from self.copied(copier)):
            end = copier.offset
        elif (yield from feed.any_of('"{[', offset)) > offset:
            raise ValueError(f"{argument.key} has no value")
        else:
            ends = [pieces(literal)[0] for literal in self.syntax.closings]
            end = (yield from feed.find(MarkSet([*SPACES, *ends]), offset)).start
        if end <= offset:
            raise ValueError(f"{argument.key} has no value")
        value = self._typed(argument, feed.text[offset:end])
        self.writer.end_value(value, end, end)
        return value, end

    def _closing_of(
        self, closing: str, argument: Argument, offset: int
    ) -> Reading[FoundMark | None]:
        """Mark that ends a value; the rest of the call follows.

        Another argument or call ends a value that nothing closes.
        """
        marks = MarkSet([closing, self._next, self._opening, CDATA_OPENS, CDATA_CLOSES])
        first: FoundMark | None = None
        is_data = False
        scan = offset
        while True:
            mark = yield from self.feed.find(marks, scan)
            if not mark.text:
                return first
            scan = mark.end
            if mark.text == self._next:
                if not is_data and (yield from self._is_next(argument, mark.start)):
                    return FoundMark(offset + len(self.feed.text[offset : mark.start].rstrip()))
                continue
            if mark.text == self._opening:
                if is_data or not (yield from self._begins_call(mark.start)):
                    continue
                outer = yield from self._enclosing(closing, mark.end)
                if outer is None:
                    if self.feed.is_cut:
                        return first
                    return self._before_call(offset, mark.start)
                mark = outer
                scan = outer.end
            if mark.text != closing:
                is_data = mark.text == CDATA_OPENS and (is_data or mark.start == offset)
                continue
            first = first or mark
            if not is_data and (yield from self._ends_value(mark.end)):
                return mark

    def _begins_call(self, offset: int) -> Reading[bool]:
        """Whether a call of an offered tool with an argument opens here."""
        feed = self.feed
        opens = self.syntax.opens
        start = yield from feed.literal(opens[opens.rfind(self._opening) :], offset)
        if start is None or (yield from self.tool_name(start)) < 0:
            return False
        try:
            _, end = yield from self.read_head(start, (self._next,))
        except UNREADABLE:
            return False
        return (yield from feed.literal(self._next, end)) is not None

    def _enclosing(self, closing: str, offset: int) -> Reading[FoundMark | None]:
        """Mark that closes a value in which calls are quoted."""
        bounds = MarkSet([closing, self._next])
        depth = 0
        while (mark := (yield from self.feed.find(bounds, offset))).text:
            depth = depth + (1 if mark.text == self._next else -1)
            offset = mark.end
            if depth < 0:
                return mark
        return None

    def _missing_closing(self, argument: Argument, offset: int) -> FoundMark | None:
        """End of an offered tool's call, in place of a closing mark."""
        feed = self.feed
        if not self.types.has(argument.name) or feed.is_cut:
            return None
        mark = MarkSet(self.closing_marks).search(feed.text, offset, is_final=True)
        return self._before_call(offset, len(feed.text) if mark is None else mark.start)

    def _before_call(self, offset: int, end: int) -> FoundMark:
        """End of a value before the marks between two calls."""
        syntax = self.syntax
        text = self.feed.text[offset:end].rstrip()
        between = f"{syntax.closes} {syntax.section_closes} {syntax.section_opens} {syntax.opens}"
        for piece in reversed(pieces(between)):
            text = text.removesuffix(piece).rstrip()
        return FoundMark(offset + len(text))

    def _is_next(self, argument: Argument, offset: int) -> Reading[bool]:
        """Whether another argument opens here, and not inside a text."""
        start = yield from self.feed.literal(self._body.argument_opens, offset)
        following = None
        if start is not None:
            following = yield from self._argument(argument.name, start)
        if following is None or following.key in self._read_keys:
            return False
        if not self.types.declares(argument.name, following.key):
            return False
        closing = self._body.value_closes.strip()
        mark = yield from self.feed.find(MarkSet([closing, *self.closing_marks]), following.offset)
        if mark.text != closing:
            return True
        return (yield from self._ends_value(mark.end))

    def _ends_pairs(self, offset: int) -> Reading[bool]:
        """Whether no other argument can follow."""
        offset = yield from self.feed.space(offset)
        return offset == len(self.feed.text) or (yield from self.closes_at(offset))

    def _ends_value(self, offset: int) -> Reading[bool]:
        """Whether the next argument, the call's end or the text's follows."""
        following = yield from self.feed.literal(self._body.argument_opens, offset)
        return following is not None or (yield from self._ends_pairs(offset))

    def _readable(self, argument: Argument, text: str) -> Any:
        """Value of an argument; its text if unreadable in an open call.

        Raises what `_typed` raises.
        """
        try:
            return self._typed(argument, text)
        except UNREADABLE:
            if self.writer.is_open:
                return text
            raise

    def _typed(self, argument: Argument, text: str) -> Any:
        if argument.is_text:
            return text
        if argument.is_text is False or self._body.has_json_text:
            return _json_or_text(text, argument.types)
        if self._body.item:
            return tag_value(text, argument.types)
        return argument_value(text, argument.types)


def _next_opening(body: TaggedBody) -> str:
    """Mark of an argument that no text is likely to hold."""
    mark = first_mark(body.argument_opens)
    is_text = body.value_closes.strip() and not body.has_json_text
    is_certain = is_text and KEY not in body.value_closes and len(mark) >= MIN_MARK
    if is_certain:
        return mark
    return ""


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
    if is_quoted:
        return argument_value(text, types)
    return value


class TypedPlace(Struct, frozen=True):
    """Types of a value in parameters `root`, inside `depth` others."""

    types: SchemaTypes
    root: Schema
    depth: int = 0

    @property
    def containers(self) -> frozenset[str]:
        """Containers that may stand here; none beside text."""
        is_text = bool(self.types.texts) and self.types != ANY
        if is_text:
            return frozenset()
        return CONTAINERS & type_names(self.types)

    def member(self, key: str) -> "TypedPlace":
        """The place of a member of the object."""
        return self._inner([_member(schema, key) for schema in self.types.others])

    def item(self) -> "TypedPlace":
        """The place of an item of the list."""
        return self._inner([schema.get("items") for schema in self.types.others])

    def _inner(self, schemas: list[Any]) -> "TypedPlace":
        described = [schema for schema in schemas if isinstance(schema, dict)]
        types = joined_types(schema_types(schema, self.root) for schema in described)
        return TypedPlace(types if described else ANY, self.root, self.depth + 1)


class NestedTags:
    """Reads values of a tagged body with an `item` tag."""

    def __init__(self, feed: TextFeed, body: TaggedBody) -> None:
        self._feed = feed
        self._body = body
        self._key_end = MarkSet([body.value_opens.strip()])

    def begins(self, offset: int, place: TypedPlace) -> Reading[bool]:
        """Whether a container stands here that the schema allows."""
        if not place.containers or place.depth > MAX_NESTED:
            return False
        feed = self._feed
        opens = self._body.argument_opens.strip()
        offset = yield from feed.space(offset)
        return (yield from feed.starts(opens, offset)) and not (
            yield from feed.starts(f"{opens}/", offset)
        )

    def container(self, key: str, offset: int, place: TypedPlace) -> Reading[tuple[Any, int]]:
        """Object or list in a tag, and its end. Raises ValueError."""
        feed = self._feed
        body = self._body
        closes = body.value_closes.replace(KEY, key)
        members: list[tuple[str, Any]] = []
        while True:
            end = yield from feed.literal(closes, offset)
            if end is not None:
                return _joined(members, body.item, place), end
            start = yield from feed.literal(body.argument_opens, offset)
            mark = None if start is None else (yield from feed.find(self._key_end, start))
            if start is None or not mark or not mark.text:
                raise ValueError(f"nothing closes {key}")
            name = feed.text[start : mark.start].strip()
            is_item = name == body.item and "array" in place.containers
            inner = place.item() if is_item else place.member(name)
            value, offset = yield from self._value(name, mark.end, inner)
            members.append((name, None if is_item and value == "" else value))

    def _value(self, key: str, offset: int, place: TypedPlace) -> Reading[tuple[Any, int]]:
        if (yield from self.begins(offset, place)):
            return (yield from self.container(key, offset, place))
        closes = self._body.value_closes.strip().replace(KEY, key)
        mark = yield from self._feed.find(MarkSet([closes]), offset)
        if not mark.text:
            raise ValueError(f"nothing closes {key}")
        return tag_value(self._feed.text[offset : mark.start], place.types), mark.end


def tag_value(text: str, types: SchemaTypes) -> Any:
    """Value of a tag without tags, maybe an empty container."""
    if not text.strip() and not types.texts:
        names = type_names(types)
        if "object" in names:
            return {}
        if "array" in names:
            return []
        return None
    return argument_value(text, types)


def _member(schema: Schema, key: str) -> Any:
    properties = schema.get("properties")
    members = properties if isinstance(properties, dict) else {}
    return members.get(key, schema.get("additionalProperties"))


def _joined(members: list[tuple[str, Any]], item: str, place: TypedPlace) -> Any:
    """A list of all items, or else an object."""
    is_list = bool(members) and all(name == item for name, _ in members)
    if is_list and "array" in place.containers:
        return [value for _, value in members]
    by_name: dict[str, list[Any]] = {}
    for name, value in members:
        by_name.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in by_name.items()}
