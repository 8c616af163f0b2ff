"""Reads calls whose arguments are one value: JSON, Python's, Gemma's."""

import re
from collections.abc import Callable, Container, Iterable
from typing import Any

from mlxstack.core.conversation import ToolCall
from mlxstack.text.formats.argument_values import object_of
from mlxstack.text.formats.call_parts import QUOTES, SEPARATORS, CallParts, ReadCalls
from mlxstack.text.formats.checked_calls import UNREADABLE, checked_call
from mlxstack.text.formats.description import GemmaBody, JsonBody, PythonBody
from mlxstack.text.formats.gemma_values import parse_gemma_call
from mlxstack.text.formats.json_calls import JsonCalls
from mlxstack.text.formats.notations import JSON, PYTHON, gemma_notation
from mlxstack.text.formats.python_calls import PythonCalls
from mlxstack.text.formats.text_feed import FENCE, MarkSet, Reading

PYTHON_QUOTES = ('"', "'")
NAME_KEYS = frozenset({"name", "function", "tool", "tool_name", "action"})
ARGUMENT_KEYS = frozenset(
    {"arguments", "parameters", "args", "input", "tool_input", "action_input"}
)
LIST_KEYS = ("tool_calls", "calls")
_PYTHON_OBJECT = re.compile(r"[\s\[{]+'")
_PLAIN = re.compile(r"[\w.:/-]*")
_SEPARATORS, _DOTTED, _WORD = re.compile(r"[\s,]*"), re.compile(r"[\w.-]*"), re.compile(r"\w*")


class ValueCalls:
    """Reads calls of a body that is one value."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._feed, self._syntax, self._writer = parts.feed, parts.syntax, parts.writer

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
        if end < 0:
            return None
        value = object_of(feed.text[at:end])
        items = self._items(body, value)
        checked = tuple(call for item in items if (call := _json_call(body, item)) is not None)
        if not checked or len(checked) != len(items):
            return None
        calls = self._writer.settle((*before, *checked), end)
        rest = (yield from self._next_object(body, end, calls)) if stops else None
        return ReadCalls(calls, end) if rest is None else rest

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
        self, at: int, names: Container[str], keys: Container[str], knows: Callable[[str], bool]
    ) -> Reading[bool]:
        """Whether an object of a call begins here, maybe in a list.

        Its first key is one of `keys`; the value of one of `names` is a known name.
        """
        feed = self._feed
        at = yield from feed.space(at)
        if (yield from feed.starts("[", at)):
            at = yield from feed.space(at + 1)
        if not (yield from feed.starts("{", at)):
            return False
        read = yield from self._quoted_word((yield from feed.space(at + 1)))
        if read is None or read[0] not in keys:
            return False
        at = yield from feed.space(read[1])
        if not (yield from feed.starts(":", at)):
            return False
        if read[0] not in names:
            return True
        value = yield from self._quoted_word((yield from feed.space(at + 1)))
        return value is not None and knows(value[0])

    def begins_call(self, at: int, knows: Callable[[str], bool]) -> Reading[bool]:
        """Whether a list of Python calls begins here, with a known name."""
        feed = self._feed
        if not (yield from feed.starts("[", at)):
            return False
        start = yield from feed.space(at + 1)
        end = yield from feed.after(_DOTTED, start)
        return knows(feed.text[start:end]) and (yield from feed.starts("(", end))

    def plain_call(self, at: int, knows: Callable[[str], bool], sign: str = "(") -> Reading[int]:
        """Position of the bracket of a known call; -1 without one."""
        end = yield from self._feed.after(_DOTTED, at)
        is_call = knows(self._feed.text[at:end]) and (yield from self._feed.starts(sign, end))
        return end if is_call else -1

    def _quoted_word(self, at: int) -> Reading[tuple[str, int] | None]:
        """Word in quotes, and the position after them."""
        feed = self._feed
        for quote in PYTHON_QUOTES:
            if (yield from feed.starts(quote, at)):
                end = yield from feed.after(_PLAIN, at + 1)
                is_closed = yield from feed.starts(quote, end)
                return (feed.text[at + 1 : end], end + 1) if is_closed else None
        return None

    def _next_object(
        self, body: JsonBody, at: int, before: tuple[ToolCall, ...]
    ) -> Reading[ReadCalls | None]:
        """Calls of further objects between the same marks."""
        feed = self._feed
        at = yield from feed.space(at)
        for separator in SEPARATORS:
            if (yield from feed.starts(separator, at)):
                at = yield from feed.space(at + 1)
        if not (yield from feed.starts("{", at)):
            return None
        try:
            calls = yield from self.json(body, at, before)
        except UNREADABLE:
            calls = None
        if calls is None and self._writer.is_open:
            raise ValueError("the arguments of a call that was told are no JSON")
        return calls

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

    def named(self, at: int) -> Reading[ReadCalls | None]:
        head = yield from self._parts.read_head(at, ("{", FENCE))
        return None if head is None else (yield from self._parts.named(*head))

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
                end = len(feed.text) if mark is None else mark.start
            else:
                mark, end = None, (yield from feed.balanced(at, PYTHON_QUOTES, ()))
            try:
                calls = whole.parse(feed.text[at:end]) if end >= 0 else None
                return None if calls is None else ReadCalls(self._writer.settle(calls, end), end)
            except UNREADABLE:
                if mark is None:
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
            at = yield from self._parts.object(
                end, PYTHON, self._parts.outer_closings, whole.arguments_of(name)
            )
            if at < 0:
                return -1

    def gemma(self, body: GemmaBody, at: int) -> Reading[ReadCalls | None]:
        feed = self._feed
        head = yield from self._parts.read_head(at, ("{",))
        if head is None:
            return None
        fields, start = head
        stops = self._parts.outer_closings
        if not (yield from feed.starts("{", start)):
            is_closed = yield from self._parts.closes_at(start)
            return self._parts.settled(fields, {}, start) if is_closed else None
        if self._writer.open(fields["name"]):
            end = yield from self._parts.object(start, gemma_notation(body.quote), stops)
            if end >= 0:
                return ReadCalls(tuple(self._writer.calls), end)
        end = yield from feed.balanced(start, (body.quote,), stops)
        if end < 0:
            return None
        arguments = parse_gemma_call(feed.text[start:end], body.quote)
        return self._parts.settled(fields, arguments, end)

    def message(self, name: str, at: int, ends: tuple[str, ...]) -> Reading[ReadCalls]:
        """Call whose arguments are a message, up to one of `ends`."""
        feed, writer = self._feed, self._writer
        start = yield from feed.space(at)
        end = -1
        if (yield from feed.starts("{", start)):
            if writer.open(name):
                end = yield from self._parts.object(start, JSON, ends)
            if end < 0:
                end = yield from feed.balanced(start, QUOTES, ends)
        mark = yield from feed.find(MarkSet(ends), max(end, at))
        stop = len(feed.text) if mark is None else mark.start
        if writer.is_open and mark is None and feed.is_cut:
            writer.cut()
            return ReadCalls((), stop, is_closed=False, is_cut=True)
        call = None if writer.calls else _message_call(name, feed.text[at:stop])
        calls = writer.settle(None if call is None else (call,), stop)
        return ReadCalls(calls, stop, mark is not None)


def _message_call(name: str, message: str) -> ToolCall | None:
    try:
        return checked_call(name, None, object_of(message.strip()))
    except ValueError:
        return None


def _json_call(body: JsonBody, item: Any) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
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
