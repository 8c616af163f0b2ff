"""Incremental parser of tool calls for a described syntax."""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.text.formats.argument_values import (
    UNDECODABLE,
    ArgumentTypes,
    argument_value,
    object_of,
)
from mlxstack.text.formats.description import (
    ARGUMENTS,
    ID,
    INDEX,
    KEY,
    NAME,
    TYPE,
    CallBody,
    CallSyntax,
    GemmaBody,
    JsonBody,
    NamedBody,
    PublishedBody,
    PythonBody,
    TaggedBody,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.text.formats.gemma_values import parse_gemma_call
from mlxstack.text.formats.nested_tags import NestedTags, TypedPlace, scalar
from mlxstack.text.formats.python_calls import parse_python_calls
from mlxstack.text.formats.text_feed import FoundMark, MarkSet, Reading, TextFeed
from mlxstack.text.tool_call_parser import UNREADABLE, checked_call, parse_calls, tool_schemas

MAX_HEAD = 300
"""The most characters between the mark of a call and its arguments."""
_SLOT = re.compile(r"[^\s<>\"'{}\[\](),=]+")
_NAMED = re.compile(r'[\[{].*?"name"\s*:\s*"([^"]+)"', re.DOTALL)
_BRACKETS = re.compile(r"[\s}\]]*")
_KEY = re.compile(r"[^\s<>/][^<>]*")
QUOTES = ('"',)
PYTHON_QUOTES = ('"', "'")
SEPARATORS = (",", ";")
SPACES = (" ", "\n", "\t", "\r")
FOREIGN = JsonBody((), ("name",), ("arguments",))


class ReadCalls(Struct, frozen=True):
    """Calls and the position after them; `is_closed`: their last mark is there."""

    calls: tuple[ToolCall, ...]
    end: int
    is_closed: bool = True


class CallReader:
    """Reads calls from a feed, with argument types of the tools."""

    def __init__(self, syntax: CallSyntax, feed: TextFeed, tools: Iterable[Tool]) -> None:
        self._syntax = syntax
        self._feed = feed
        tools = tuple(tools)
        self._types = ArgumentTypes(tools)
        self._schemas = tool_schemas(tools)
        self.strict = strict_marks(syntax)
        self.lenient = trigger_marks(syntax) - self.strict
        closes = [one for one in (syntax.section_closes, syntax.closes) if one.strip()]
        self._closings = MarkSet(pieces(one)[-1] for one in closes)
        self._head = _head_groups(syntax.body)
        if isinstance(syntax.body, TaggedBody):
            self._nested = NestedTags(feed, syntax.body)

    def section(self, at: int, *, is_lenient: bool = False) -> Reading[ReadCalls | None]:
        """The calls that begin at a mark; None if there are none."""
        syntax, feed = self._syntax, self._feed
        inside = yield from feed.literal(syntax.section_opens, at)
        has_section = inside is not None and bool(syntax.section_opens.strip())
        if isinstance(syntax.body, PublishedBody):
            return (yield from self._published(syntax.body, at if inside is None else inside))
        end = at if inside is None else inside
        calls: list[ToolCall] = []
        is_closed = True
        while True:
            read = yield from self._call(end, is_lenient=is_lenient and not calls)
            if read is None:
                break
            calls += read.calls
            end, is_closed = read.end, read.is_closed
            if syntax.section_closes.strip():
                after = yield from feed.literal(syntax.section_closes, end)
                if after is not None:
                    return ReadCalls(tuple(calls), after)
            # Calls that nothing closes stand in a row; others are told one by one.
            is_row = has_section or not syntax.closes.strip() or not is_closed
            following = (yield from self._following(end)) if is_row else -1
            if following < 0:
                break
            end = following
        if has_section and not calls:
            # A section without calls says nothing.
            after = yield from feed.literal(syntax.section_closes, end)
            return None if after is None or not syntax.section_closes else ReadCalls((), after)
        is_closed = is_closed and not (has_section and syntax.section_closes.strip())
        return ReadCalls(tuple(calls), end, is_closed) if calls else None

    def knows(self, name: str) -> bool:
        """Whether a tool of this name is offered."""
        return self._types.has(name)

    def is_named(self, text: str) -> bool:
        """Whether a text begins as an unmarked call of an offered tool."""
        head = text.lstrip()[:MAX_HEAD]
        name = _NAMED.match(head) if self._syntax.is_bare else None
        for mark in self.lenient:
            name = name or (_SLOT.match(head, len(mark)) if head.startswith(mark) else None)
        return name is not None and self._types.has(name[name.lastindex or 0])

    def unreadable(self, at: int) -> Reading[int]:
        """End of an unparsable section: its closing mark, or the text's end."""
        mark = yield from self._feed.find(self._closings, at)
        if mark is None:
            return len(self._feed.text)
        end = mark.end
        rest = yield from self._feed.literal(self._syntax.section_closes, end)
        return end if rest is None else rest

    def _following(self, end: int) -> Reading[int]:
        """Position of the call after another one; -1 without one."""
        feed, syntax = self._feed, self._syntax
        after = yield from feed.literal(syntax.between, end)
        at = yield from feed.space(end if after is None else after)
        for separator in SEPARATORS:
            if (yield from feed.starts(separator, at)):
                at = yield from feed.space(at + 1)
        opening = first_mark(syntax.opens) or first_mark(syntax.section_opens)
        if not opening and isinstance(syntax.body, JsonBody):
            opening = "{"
        return at if opening and (yield from feed.starts(opening, at)) else -1

    def _call(self, at: int, *, is_lenient: bool) -> Reading[ReadCalls | None]:
        feed, syntax = self._feed, self._syntax
        start = at = yield from feed.space(at)
        again = yield from feed.literal(syntax.section_opens, at)
        inside = yield from feed.literal(syntax.opens, at if again is None else again)
        is_marked = inside is not None and not syntax.is_bare
        if inside is None and is_lenient:
            opening = next(iter(self.lenient), "")
            inside = yield from feed.literal(_from(syntax.opens, opening), start)
        if inside is None:
            return (yield from self._foreign(start))
        try:
            body = yield from self._body(inside)
        except UNREADABLE:
            body = None
        if body is None:
            return (yield from self._foreign(start))
        if is_lenient and not is_marked and not self._knows(body):
            return None
        end = yield from self._closing(body.end)
        is_closed = not syntax.closes.strip() or end > body.end
        return ReadCalls(body.calls, end, is_closed)

    def _closing(self, at: int) -> Reading[int]:
        """Position after the closing mark, and after brackets too many."""
        feed, syntax = self._feed, self._syntax
        end = yield from feed.optional(syntax.closes, at)
        if end > at or not isinstance(syntax.body, JsonBody | NamedBody):
            return end
        rest = yield from feed.after(_BRACKETS, at)
        if not syntax.closes.strip():
            return rest if rest == len(feed.text) else at
        after = yield from feed.literal(syntax.closes, rest)
        return at if after is None else after

    def _foreign(self, at: int) -> Reading[ReadCalls | None]:
        """A call that is JSON between the marks of another syntax."""
        mark = first_mark(self._syntax.opens)
        if isinstance(self._syntax.body, JsonBody) or not mark:
            return None
        inside = yield from self._feed.literal(mark, at)
        try:
            body = None if inside is None else (yield from self._json(FOREIGN, inside))
        except UNREADABLE:
            return None
        if body is None:
            return None
        closing = next(reversed(pieces(self._syntax.closes)), "")
        end = yield from self._feed.optional(closing, body.end)
        return ReadCalls(body.calls, end, not closing or end > body.end)

    def _knows(self, read: ReadCalls) -> bool:
        return all(self._types.has(call.name) for call in read.calls)

    def _body(self, at: int) -> Reading[ReadCalls | None]:
        match self._syntax.body:
            case JsonBody() as body:
                return (yield from self._json(body, at))
            case NamedBody():
                return (yield from self._named(at))
            case TaggedBody() as body:
                return (yield from self._tagged(body, at))
            case PythonBody():
                return (yield from self._python(at))
            case GemmaBody() as body:
                return (yield from self._gemma(body, at))
        return None

    def _json(self, body: JsonBody, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        at = yield from feed.space(at)
        if not (yield from self._opens_json(body, at)):
            return None
        end = yield from feed.balanced(at, QUOTES, self._outer_closings())
        if end < 0:
            return None
        value = object_of(feed.text[at:end])
        items = value if isinstance(value, list) else [value]
        calls = tuple(_json_call(body, item) for item in items)
        checked = tuple(call for call in calls if call is not None)
        if not checked or len(checked) < len(calls):
            return None
        rest = (yield from self._next_object(body, end)) if self._syntax.closes.strip() else None
        return (
            ReadCalls(checked, end) if rest is None else ReadCalls(checked + rest.calls, rest.end)
        )

    def _next_object(self, body: JsonBody, at: int) -> Reading[ReadCalls | None]:
        """Calls of more objects between the same pair of marks."""
        feed = self._feed
        at = yield from feed.space(at)
        for separator in SEPARATORS:
            if (yield from feed.starts(separator, at)):
                at = yield from feed.space(at + 1)
        if not (yield from feed.starts("{", at)):
            return None
        try:
            return (yield from self._json(body, at))
        except UNREADABLE:
            return None

    def _opens_json(self, body: JsonBody, at: int) -> Reading[bool]:
        """Whether JSON begins here; unmarked objects need a known key."""
        feed = self._feed
        if (yield from feed.starts("[", at)):
            if not self._syntax.is_bare:
                return True
            at = yield from feed.space(at + 1)
        if not (yield from feed.starts("{", at)):
            return False
        if not self._syntax.is_bare:
            return True
        at = yield from feed.space(at + 1)
        keys = {path[0] for path in (body.name, body.arguments, body.id, ("type",)) if path}
        for key in sorted(keys | {"name"}):
            if (yield from feed.starts(f'"{key}"', at)):
                return True
        return False

    def _outer_closings(self) -> tuple[str, ...]:
        return tuple(mark for mark in self._closings.marks if is_mark(mark))

    def _named(self, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        head = yield from self._read_head(at, ("{",))
        if head is None:
            return None
        fields, at = head
        at = yield from feed.space(at)
        arguments: Any = {}
        if (yield from feed.starts("{", at)):
            end = yield from feed.balanced(at, QUOTES, self._outer_closings())
            if end < 0:
                return None
            arguments = object_of(feed.text[at:end])
            at = end
        elif at < len(feed.text) and not (yield from self._closes_at(at)):
            return None
        return _one(fields, arguments, at)

    def _tagged(self, body: TaggedBody, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        opening = first_mark(body.argument_opens)
        at = at if opening else (yield from feed.space(at))
        head = yield from self._read_head(at, (opening,) if opening else SPACES)
        if head is None:
            return None
        fields, at = head
        arguments: dict[str, Any] = {}
        before, _, after = body.value_opens.partition(TYPE)
        key_end = MarkSet([pieces(before)[0] if before.strip() else ""])
        while True:
            start = yield from feed.literal(body.argument_opens, at)
            if start is None or (not opening and (yield from self._ends_pairs(at))):
                break
            mark = yield from feed.find(key_end, start)
            if mark is None or mark.start - start > MAX_HEAD:
                return None
            key = feed.text[start : mark.start].strip()
            if not (_KEY if opening else _SLOT).fullmatch(key):
                break
            inside = yield from feed.literal(before, mark.start)
            kind = ""
            if inside is not None and TYPE in body.value_opens:
                stop = yield from feed.find(MarkSet([pieces(after)[0]]), inside)
                kind = "" if stop is None else feed.text[inside : stop.start]
                inside = None if stop is None else (yield from feed.literal(after, stop.start))
            if inside is None:
                return None
            value = yield from self._argument(body, (fields["name"], key, kind), inside)
            if value is None:
                return None
            arguments[key], at = value
        if at < len(feed.text) and not (yield from self._closes_at(at)):
            return None
        return _one(fields, arguments, at)

    def _argument(
        self, body: TaggedBody, names: tuple[str, str, str], at: int
    ) -> Reading[tuple[Any, int] | None]:
        """Value of an argument, and the position after it."""
        name, key, kind = names
        if body.item:
            place = TypedPlace(self._types.of(name, key), self._types.root(name))
            if (yield from self._nested.begins(at, place)):
                return (yield from self._nested.container(key, at, place))
        read = yield from self._value(body, key, at)
        return None if read is None else (self._typed(body, name, key, kind, read[0]), read[1])

    def _value(self, body: TaggedBody, key: str, at: int) -> Reading[tuple[str, int] | None]:
        """Text of an argument, closing marks included where more follows."""
        feed = self._feed
        if not body.value_closes:
            return (yield from self._json_value(at))
        at = yield from self._skip(body.value_opens[len(body.value_opens.rstrip()) :], at)
        closing = body.value_closes.strip().replace(KEY, key)
        marks = MarkSet([closing, "<![CDATA[", "]]>"])
        first: FoundMark | None = None
        is_data, scan = False, at
        while True:
            mark = yield from feed.find(marks, scan)
            if mark is None:
                break
            scan = mark.end
            if mark.text != closing:
                is_data = mark.text == "<![CDATA[" and (is_data or mark.start == at)
                continue
            first = first or mark
            if not is_data and (yield from self._ends_value(body, mark.end)):
                return self._cut(body, at, mark.start), mark.end
        return None if first is None else (self._cut(body, at, first.start), first.end)

    def _json_value(self, at: int) -> Reading[tuple[str, int] | None]:
        """A value of JSON that nothing closes."""
        feed = self._feed
        at = yield from feed.space(at)
        for sign in ('"', "{", "["):
            if (yield from feed.starts(sign, at)):
                end = yield from feed.balanced(at, QUOTES, ())
                return None if end < 0 else (feed.text[at:end], end)
        closes = (self._syntax.closes, self._syntax.section_closes)
        ends = [pieces(one)[0] for one in closes if one.strip()]
        mark = yield from feed.find(MarkSet([*SPACES, *ends]), at)
        end = len(feed.text) if mark is None else mark.start
        return (feed.text[at:end], end) if end > at else None

    def _ends_pairs(self, at: int) -> Reading[bool]:
        """Whether no other argument can follow."""
        at = yield from self._feed.space(at)
        return at == len(self._feed.text) or (yield from self._closes_at(at))

    def _skip(self, space: str, at: int) -> Reading[int]:
        """The position after exactly this white space, if it is there."""
        return at + len(space) if space and (yield from self._feed.starts(space, at)) else at

    def _cut(self, body: TaggedBody, start: int, end: int) -> str:
        space = body.value_closes[: len(body.value_closes) - len(body.value_closes.lstrip())]
        text = self._feed.text[start:end]
        return text.removesuffix(space)

    def _ends_value(self, body: TaggedBody, at: int) -> Reading[bool]:
        """Whether the next argument, the call's end or the text's follows."""
        at = yield from self._feed.space(at)
        if at == len(self._feed.text):
            return True
        if (yield from self._feed.literal(body.argument_opens, at)) is not None:
            return True
        return (yield from self._closes_at(at))

    def _closes_at(self, at: int) -> Reading[bool]:
        """Whether a call ends here: its mark, the section's, or another."""
        syntax = self._syntax
        for literal in (syntax.closes, syntax.section_closes, syntax.opens):
            mark = next(iter(pieces(literal)), "")
            if mark and (yield from self._feed.literal(mark, at)) is not None:
                return True
        return not syntax.closes.strip() and not syntax.section_closes.strip()

    def _typed(self, body: TaggedBody, name: str, key: str, kind: str, text: str) -> Any:
        words = dict(body.types)
        types = self._types.of(name, key)
        if kind and words:
            is_text = kind == words.get("string")
            return text if is_text else _json_or_text(text)
        if body.has_json_text:
            return _json_or_text(text)
        return scalar(text, types) if body.item else argument_value(text, types)

    def _python(self, at: int) -> Reading[ReadCalls | None]:
        """Python list of calls, up to the first plausible closing mark."""
        feed = self._feed
        at = yield from feed.space(at)
        if not (yield from feed.starts("[", at)):
            return None
        scan = at
        while True:
            if self._closings.marks:
                mark = yield from feed.find(self._closings, scan)
                end = len(feed.text) if mark is None else mark.start
            else:
                mark, end = None, (yield from feed.balanced(at, PYTHON_QUOTES, ()))
            try:
                return ReadCalls(parse_python_calls(feed.text[at:end]), end) if end >= 0 else None
            except UNREADABLE:
                if mark is None:
                    return None
                scan = mark.end

    def _gemma(self, body: GemmaBody, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        head = yield from self._read_head(at, ("{",))
        if head is None:
            return None
        fields, start = head
        end = yield from feed.balanced(start, (body.quote,), self._outer_closings())
        if end < 0:
            return None
        return _one(fields, parse_gemma_call(feed.text[start:end], body.quote), end)

    def _published(self, body: PublishedBody, at: int) -> Reading[ReadCalls | None]:
        mark = yield from self._feed.find(self._closings, at)
        end = len(self._feed.text) if mark is None else mark.start
        calls = parse_calls(body.parser, self._feed.text[at:end], self._schemas)
        if not calls:
            return None
        return ReadCalls(calls, end if mark is None else mark.end, mark is not None)

    def _read_head(
        self, at: int, stops: tuple[str, ...]
    ) -> Reading[tuple[dict[str, str], int] | None]:
        """Name and id of a call, and the position after them."""
        feed = self._feed
        fields: dict[str, str] = {}
        start = at
        closes = (self._syntax.closes, self._syntax.section_closes)
        last = [*stops, *(pieces(one)[0] for one in closes if one.strip())]
        for group, (literal, slot) in enumerate(self._head):
            if literal:
                inside = yield from feed.literal(literal, at)
                if inside is None and slot in (ID, INDEX):
                    continue
                if inside is None:
                    return None if at < len(feed.text) else (fields, at)
                at = inside
            if not slot:
                continue
            ends = [pieces(one)[0] for one, _ in self._head[group + 1 :] if one.strip()]
            is_last = not self._head[-1][0] or self._head[-1][1]
            mark = yield from feed.find(MarkSet([*ends, *(last if is_last else ())]), at)
            end = len(feed.text) if mark is None else mark.start
            text = feed.text[at:end].strip()
            if end - at > MAX_HEAD or not _SLOT.fullmatch(text):
                return None
            fields[slot.strip("{}")] = text
            at = end
        if "index" in fields and "id" not in fields:
            # The words of the head are the id of such a call.
            opening = next(reversed(pieces(self._syntax.opens)), "")
            head = f"{fields['name']}:{fields['index']}"
            fields["id"] = ("" if is_mark(opening) else opening) + head
            if not feed.text[start:at].startswith(head):
                del fields["id"]
        return (fields, at) if "name" in fields else None


def strict_marks(syntax: CallSyntax) -> set[str]:
    """The marks that announce calls."""
    return {first_mark(one) for one in (syntax.section_opens, syntax.opens)} - {""}


def trigger_marks(syntax: CallSyntax) -> set[str]:
    """Opening marks, and the one of calls without the first."""
    inner = [one for one in pieces(syntax.opens)[1:] if one.startswith("<") and len(one) > 2]
    return strict_marks(syntax) | set(inner[-1:])


def _head_groups(body: CallBody) -> list[tuple[str, str]]:
    """Literals between a call's mark and arguments, with following slots."""
    if isinstance(body, GemmaBody):
        return [("call:", NAME)]
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


def _from(literal: str, piece: str) -> str:
    return literal[literal.rfind(piece) :] if piece else literal


def _one(fields: dict[str, str], arguments: Any, end: int) -> ReadCalls | None:
    call = checked_call(fields["name"], fields.get("id"), arguments)
    return None if call is None else ReadCalls((call,), end)


def _json_call(body: JsonBody, item: Any) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    if not body.name:
        ((name, arguments),) = item.items()
        return checked_call(name, None, arguments)
    inner = item.get("function")
    function = inner if isinstance(inner, dict) else item
    name = _at(item, body.name) or function.get("name")
    arguments = _at(item, body.arguments)
    if arguments is None:
        arguments = function.get("arguments", function.get("parameters"))
    return checked_call(name, _at(item, body.id) if body.id else None, arguments)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _json_or_text(text: str) -> Any:
    try:
        return object_of(text.strip())
    except UNDECODABLE:
        return text
