"""Reads calls whose arguments are one value: JSON, Python's, Gemma's."""

import json
import re
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.argument_values import object_of
from mlxstack.text.formats.call_parts import QUOTES, SEPARATORS, CallParts, ReadCalls
from mlxstack.text.formats.checked_calls import UNREADABLE, checked_call
from mlxstack.text.formats.description import GEMMA_HEAD, GemmaBody, JsonBody, PythonBody
from mlxstack.text.formats.gemma_values import GemmaArguments
from mlxstack.text.formats.json_calls import JsonCalls
from mlxstack.text.formats.notations import JSON, PYTHON, gemma_notation
from mlxstack.text.formats.python_calls import PythonArguments, PythonCalls
from mlxstack.text.formats.text_feed import FENCE, FoundMark, MarkSet, Reading
from mlxstack.text.formats.value_copier import ValueCopier

PYTHON_QUOTES = ('"', "'")
NAME_KEYS = frozenset({"name", "function", "function_name", "tool", "tool_name", "action"})
ARGUMENT_KEYS = frozenset(
    {"arguments", "parameters", "args", "input", "tool_input", "action_input"}
)
LIST_KEYS = ("tool_calls", "calls")
TYPE_KEY = "type"
KINDS = ("function", "function_call", "tool_call", "tool_use")
MAX_IN_VAIN = 64
"""The most braces of a malformed list at which no object begins."""

_DECODER = json.JSONDecoder(strict=False)
_PYTHON_OBJECT = re.compile(r"[\s\[{]+'")
_PLAIN = re.compile(r"[\w.:/-]*")
_SEPARATORS = re.compile(r"[\s,]*")
_DOTTED = re.compile(r"[\w.-]*")
_WORD = re.compile(r"[\w$-]*")


class ValueCalls:
    """Reads calls of a body that is one value."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._feed = parts.feed
        self._syntax = parts.syntax
        self._writer = parts.writer

    def json(
        self,
        body: JsonBody,
        at: int,
        before: tuple[ToolCall, ...] = (),
        *,
        is_certain: bool = False,
    ) -> Reading[ReadCalls | None]:
        """Calls of JSON values, the first maybe fenced.

        Without marks they begin with a known key, unless that `is_certain`.
        """
        feed = self._feed
        at = yield from feed.space(at)
        if not self._syntax.is_bare and (inside := (yield from feed.fence(at))) >= 0:
            return (yield from self._parts.unfenced((yield from self.json(body, inside, before))))
        if not (is_certain or (yield from self._opens_json(body, at))):
            return None
        stops = self._parts.outer_closings
        is_stuck = len(before) > len(self._writer.calls)
        json_calls = JsonCalls(body, at, stops, self._writer, is_stuck=is_stuck)
        copier = json_calls.copier
        yield from self._parts.copied(copier)
        quotes = PYTHON_QUOTES if _PYTHON_OBJECT.match(feed.text, at) else QUOTES
        end = copier.at if copier.is_done else (yield from feed.balanced(at, quotes, stops))
        checked = () if end < 0 else self._checked(body, feed.text[at:end])
        if not checked:
            is_list = not before and feed.text.startswith("[", at)
            sound = self._sound(body, json_calls.told_end, end)
            return (yield from sound) if is_list else None
        calls = self._writer.settle((*before, *checked), end)
        rest = (yield from self._next_object(body, end, calls)) if stops else None
        return ReadCalls(calls, end) if rest is None else rest

    def _checked(self, body: JsonBody, text: str) -> tuple[ToolCall, ...]:
        """The calls of a JSON value; none if any is malformed."""
        try:
            return tuple(_json_call(body, item) for item in self._items(body, object_of(text)))
        except UNREADABLE:
            return ()

    def _sound(
        self, body: JsonBody, at: int, end: int, before: tuple[ToolCall, ...] = ()
    ) -> Reading[ReadCalls | None]:
        """The sound calls beside malformed ones, after those before."""
        feed = self._feed
        writer = self._writer
        is_told = writer.is_open or bool(writer.calls)
        if end < 0:
            mark = yield from feed.find(self._parts.closings, at)
            end = mark.start
            if feed.is_cut and not mark.text and is_told:
                return None
        found: list[ToolCall] = []
        n_vain = 0
        start = end
        while (at := feed.text.find("{", at, end)) >= 0 and n_vain < MAX_IN_VAIN:
            try:
                item, after = _DECODER.raw_decode(feed.text, at)
            except UNREADABLE:
                n_vain = n_vain + 1
                at = at + 1
                continue
            with suppress(*UNREADABLE):
                call = _json_call(body, item)
                if self._parts.types.has(call.name):
                    start = start if found else at
                    found.append(call)
            at = after
        told = writer.settle(None, start) if writer.is_open else tuple(writer.calls)
        calls = told if len(told) > len(before) else before
        is_cut = feed.is_cut and end == len(feed.text)
        if calls or found:
            return ReadCalls((*calls, *found), end, is_cut=is_cut)
        return None

    def _items(self, body: JsonBody, value: Any) -> list[Any]:
        """The calls of a list, maybe in an object, or of names."""
        if not isinstance(value, dict):
            return value if isinstance(value, list) else [value]
        listed = [value[key] for key in LIST_KEYS if isinstance(value.get(key), list)]
        if listed and len(value) == 1:
            return list(listed[0])
        name = next(iter(value), "") if body.name and len(value) == 1 else ""
        if self._parts.types.has(str(name)) and isinstance(value[name], dict):
            return [{"name": name, "arguments": value[name]}]
        return [value]

    def begins_object(
        self, at: int, names: Container[str], keys: Container[str], following: Container[str] = ()
    ) -> Reading[bool]:
        """Whether an object of a call begins here, maybe in a list.

        Its first key is one of `keys`; the value of one of `names` is a known name, or else one of
        `following` is the second key.
        """
        feed = self._feed
        at = yield from feed.space(at)
        if (yield from feed.starts("[", at)):
            at = yield from feed.space(at + 1)
        read = yield from self._quoted_word(at, "{")
        if read is None or read[0] not in keys:
            return False
        if read[0] not in names and read[0] != TYPE_KEY:
            return (yield from feed.starts(":", (yield from feed.space(read[1]))))
        value = yield from self._quoted_word(read[1], ":")
        if value is None or read[0] not in names:
            return value is not None and value[0] in KINDS
        second = (yield from self._quoted_word(value[1], ",")) if following else None
        is_known = self._parts.types.has(value[0])
        return is_known or (second is not None and second[0] in following)

    def begins_call(self, at: int) -> Reading[bool]:
        """Whether a list of Python calls begins here, with a known name."""
        if not (yield from self._feed.starts("[", at)):
            return False
        start = yield from self._feed.space(at + 1)
        return (yield from self._parts.tool_name(start, "(")) >= 0

    def _quoted_word(self, at: int, sign: str) -> Reading[tuple[str, int] | None]:
        """Word in quotes after a sign, and the position after them."""
        feed = self._feed
        at = yield from feed.space(at)
        if not (yield from feed.starts(sign, at)):
            return None
        at = yield from feed.space(at + len(sign))
        for quote in PYTHON_QUOTES:
            if (yield from feed.starts(quote, at)):
                end = yield from feed.after(_PLAIN, at + 1)
                is_closed = yield from feed.starts(quote, end)
                if is_closed:
                    return (feed.text[at + 1 : end], end + 1)
                return None
        return None

    def _next_object(
        self, body: JsonBody, at: int, before: tuple[ToolCall, ...]
    ) -> Reading[ReadCalls | None]:
        """Calls of further objects between the same marks."""
        feed = self._feed
        at = yield from feed.space(at)
        at = yield from feed.space((yield from feed.any_of(SEPARATORS, at)))
        if not (yield from feed.starts("{", at)):
            return None
        calls = yield from self.json(body, at, before)
        if calls is None:
            calls = yield from self._sound(body, at, -1, before)
        if calls is None and self._writer.is_open:
            raise ValueError("the arguments of a call that was told are no JSON")
        return calls

    def _opens_json(self, body: JsonBody, at: int) -> Reading[bool]:
        """Whether JSON begins here; unmarked objects need a known key."""
        if not self._syntax.is_bare:
            return (yield from self._feed.any_of("[{", at)) > at
        paths = (body.name, body.arguments, body.id, ("name",), (TYPE_KEY,))
        keys = {path[0] for path in paths if path}
        return (yield from self.begins_object(at, {"name"}, keys, keys | ARGUMENT_KEYS))

    def named(self, at: int) -> Reading[ReadCalls | None]:
        fields, start = yield from self._parts.read_head(at, ("{", FENCE))
        return (yield from self._parts.named(fields, start))

    def python(self, body: PythonBody, at: int) -> Reading[ReadCalls | None]:
        """Python calls, up to the first plausible closing mark."""
        feed = self._feed
        at = yield from feed.space(at)
        is_list = yield from feed.starts("[", at)
        if body.is_list and not is_list and self._syntax.is_bare:
            return None
        whole = PythonCalls(body, self._parts.types)
        scan = yield from self._python_calls(at + is_list, whole, is_list=is_list)
        if scan >= 0:
            return ReadCalls(tuple(self._writer.calls), scan)
        scan = at
        while True:
            if self._parts.closings.marks:
                mark = yield from feed.find(self._parts.closings, scan)
                end = mark.start
            else:
                mark = FoundMark(at)
                end = yield from feed.balanced(at, PYTHON_QUOTES, ())
            try:
                calls = whole.parse(feed.text[at:end]) if end >= 0 else None
                if calls is None:
                    return None
                return ReadCalls(self._writer.settle(calls, end), end)
            except UNREADABLE:
                if not mark.text:
                    return None
                scan = mark.end

    def _python_calls(self, at: int, whole: PythonCalls, *, is_list: bool) -> Reading[int]:
        """End of the copied calls; -1 without one."""
        feed = self._feed
        while True:
            last = at
            at = yield from feed.after(_SEPARATORS, at)
            if is_list and (yield from feed.starts("]", at)):
                return at + 1 if self._writer.calls else -1
            end = yield from feed.after(_DOTTED, at)
            name = feed.text[at:end]
            if not (is_list or name):
                return last if self._writer.calls else -1
            if not (yield from feed.starts("(", end)):
                return -1
            inside = yield from feed.space(end + 1)
            after = yield from feed.after(_WORD, inside)
            sign = "=" if after > inside else ")"
            if not (yield from feed.starts(sign, (yield from feed.space(after)))):
                return -1
            if not self._writer.open(name):
                return -1
            arguments = PythonArguments(whole, self._parts.types, name)
            at = yield from self._parts.object(end, PYTHON, self._parts.outer_closings, arguments)
            if at < 0:
                return -1

    def gemma(self, body: GemmaBody, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        openings = (GEMMA_HEAD, f":{GEMMA_HEAD}", ":")
        at = yield from feed.any_of(openings, (yield from feed.space(at)))
        fields, start = yield from self._parts.read_head(at, ("{",))
        stops = self._parts.outer_closings
        if not (yield from feed.starts("{", start)):
            is_closed = yield from self._parts.closes_at(start)
            if is_closed:
                return self._parts.settled(fields, {}, start)
            return None
        arguments = GemmaArguments(self._parts.types, fields["name"])
        copier = ValueCopier(start, gemma_notation(body.quote), stops, arguments=arguments)
        if self._writer.open(fields["name"]):
            self._writer.copy(copier)
        if not (yield from self._parts.copied(copier)):
            return None
        return self._parts.settled(fields, json.loads(copier.written), copier.at)

    def message(self, name: str, at: int, ends: tuple[str, ...]) -> Reading[ReadCalls]:
        """Call whose arguments are a message, up to one of `ends`."""
        feed = self._feed
        writer = self._writer
        start = yield from feed.space(at)
        end = -1
        if (yield from feed.starts("{", start)):
            if writer.open(name):
                end = yield from self._parts.object(start, JSON, ends)
            if end < 0:
                end = yield from feed.balanced(start, QUOTES, ends)
        mark = yield from feed.find(MarkSet(ends), max(end, at))
        stop = mark.start
        if feed.is_cut and not (mark.text or writer.calls):
            if writer.is_open:
                writer.cut()
            return ReadCalls((), stop, is_closed=False, is_cut=True)
        calls: list[ToolCall] = []
        with suppress(ValueError):
            calls += [checked_call(name, None, object_of(feed.text[at:stop].strip() or "{}"))]
        told = writer.settle(None if writer.calls else calls, stop)
        return ReadCalls(told, stop, bool(mark.text))


def _json_call(body: JsonBody, item: Any) -> ToolCall:
    if not body.name:
        ((name, arguments),) = item.items()
        return checked_call(name, None, arguments)
    inner = item.get("function")
    function = inner if isinstance(inner, dict) else item
    name = _at(item, body.name) or _first(function, NAME_KEYS)
    arguments = _at(item, body.arguments)
    if arguments is None:
        arguments = _first(function, ARGUMENT_KEYS)
    if arguments is None and not ARGUMENT_KEYS & function.keys():
        others = {*NAME_KEYS, *body.name, *body.id, "type", "id"}
        arguments = {key: value for key, value in function.items() if key not in others}
    return checked_call(name, _at(item, body.id) if body.id else None, arguments)


def _first(value: dict[str, Any], keys: Iterable[str]) -> Any:
    """The first value of some keys; None without any."""
    return next((value[key] for key in sorted(keys) if value.get(key) is not None), None)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
