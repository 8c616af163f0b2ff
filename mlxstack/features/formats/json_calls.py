"""Reads calls that are JSON objects, or lists of them."""

import json
import re
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import ToolCall
from mlxstack.features.formats.call_bodies import SEPARATORS, BodyReader, CallContext, ReadCalls
from mlxstack.features.formats.call_writer import CallWriter
from mlxstack.features.formats.checked_calls import UNREADABLE, checked_call
from mlxstack.features.formats.notations import JSON
from mlxstack.features.formats.repairs import ARGUMENT_KEYS, LIST_KEY, NAME_KEYS
from mlxstack.features.formats.syntax import CallSyntax, JsonBody
from mlxstack.features.formats.text_feed import FENCE, Reading
from mlxstack.features.formats.values import Path, ValueCopier

FUNCTION = "function"
ARGUMENT_PATHS = tuple(
    (*outer, key) for outer in ((FUNCTION,), ()) for key in ("arguments", "parameters")
)
NAME_PATHS = ((FUNCTION, "name"), ("name",))
TYPE_KEY = "type"
MAX_IN_VAIN = 64
"""The most braces of a malformed list at which no object begins."""

_PLAIN = re.compile(r"[\w.:/-]*")
_DECODER = json.JSONDecoder(strict=False)


class JsonReader(BodyReader):
    """Reads calls that are JSON objects, or lists of them."""

    def __init__(
        self, syntax: CallSyntax, context: CallContext, body: JsonBody | None = None
    ) -> None:
        super().__init__(syntax, context)
        own = syntax.body if body is None else body
        assert isinstance(own, JsonBody)
        self.body = own

    def read(self, offset: int) -> Reading[ReadCalls | None]:
        return (yield from self.objects(offset))

    def objects(
        self, offset: int, before: tuple[ToolCall, ...] = (), *, is_certain: bool = False
    ) -> Reading[ReadCalls | None]:
        """Calls of JSON values after those before, the first maybe fenced.

        Without marks they begin with a known key, unless that `is_certain`.
        """
        feed = self.feed
        offset = yield from feed.space(offset)
        if not self.syntax.is_bare and (inside := (yield from feed.fence(offset))) >= 0:
            calls = yield from self.objects(inside, before)
            if calls is None:
                return None
            return replace(calls, end=(yield from feed.passed(FENCE, calls.end)))
        if not (is_certain or (yield from self._opens_json(offset))):
            return None
        is_stuck = len(before) > len(self.writer.calls)
        json_calls = JsonCalls(
            self.body, offset, self.outer_closings, self.writer, is_stuck=is_stuck
        )
        copier = json_calls.copier
        yield from self.copied(copier)
        checked = self._checked(copier.value()) if copier.is_done else ()
        end = -1
        if copier.is_done:
            end = copier.offset
        if not checked:
            if before or not feed.text.startswith("[", offset):
                return None
            return (yield from self._sound(json_calls.told_end, end))
        read = (*before, *checked)
        read = (*self.writer.calls, *read[len(self.writer.calls) :])
        more = (yield from self._next_object(end, read)) if self.outer_closings else None
        return ReadCalls(read, end) if more is None else more

    def _checked(self, value: Any) -> tuple[ToolCall, ...]:
        """The calls of a JSON value; none if any is malformed."""
        try:
            return tuple(_json_call(self.body, item) for item in self._items(value))
        except UNREADABLE:
            return ()

    def _items(self, value: Any) -> list[Any]:
        """The calls of a list, maybe in an object, or of names."""
        if not isinstance(value, dict):
            if isinstance(value, list):
                return value
            return [value]
        if len(value) == 1 and isinstance(value.get(LIST_KEY), list):
            return list(value[LIST_KEY])
        name = ""
        if self.body.name and len(value) == 1:
            name = next(iter(value), "")
        if self.types.has(str(name)) and isinstance(value[name], dict):
            return [{"name": name, "arguments": value[name]}]
        return [value]

    def _sound(
        self, offset: int, end: int, before: tuple[ToolCall, ...] = ()
    ) -> Reading[ReadCalls | None]:
        """The sound calls beside malformed ones, after those before."""
        feed = self.feed
        writer = self.writer
        if end < 0:
            mark = yield from feed.find(self.closings, offset)
            end = mark.start
            if feed.is_cut and not mark.text and writer.is_told:
                return None
        sound: list[ToolCall] = []
        n_vain = 0
        start = end
        while (offset := feed.text.find("{", offset, end)) >= 0 and n_vain < MAX_IN_VAIN:
            try:
                value, after = _DECODER.raw_decode(feed.text, offset)
            except UNREADABLE:
                n_vain = n_vain + 1
                offset = offset + 1
                continue
            with suppress(*UNREADABLE):
                call = _json_call(self.body, value)
                if self.types.has(call.name):
                    if not sound:
                        start = offset
                    sound.append(call)
            offset = after
        closed = writer.close(start)
        calls = closed if len(closed) > len(before) else before
        is_cut = feed.is_cut and end == len(feed.text)
        if calls or sound:
            return ReadCalls((*calls, *sound), end, is_cut=is_cut)
        return None

    def _next_object(self, offset: int, before: tuple[ToolCall, ...]) -> Reading[ReadCalls | None]:
        """Calls of further objects between the same marks."""
        feed = self.feed
        offset = yield from feed.space(offset)
        offset = yield from feed.space((yield from feed.any_of(SEPARATORS, offset)))
        if not (yield from feed.starts("{", offset)):
            return None
        calls = yield from self.objects(offset, before)
        if calls is None:
            calls = yield from self._sound(offset, -1, before)
        if calls is None and self.writer.is_open:
            raise ValueError("the arguments of a call that was told are no JSON")
        return calls

    def _opens_json(self, offset: int) -> Reading[bool]:
        """Whether JSON begins here; unmarked objects need a known key."""
        if not self.syntax.is_bare:
            return (yield from self.feed.any_of("[{", offset)) > offset
        paths = (self.body.name, self.body.arguments, self.body.id, ("name",), (TYPE_KEY,))
        keys = {path[0] for path in paths if path}
        return (yield from self.begins_object(offset, {"name"}, keys, keys | ARGUMENT_KEYS))

    def begins_object(
        self,
        offset: int,
        names: Container[str],
        keys: Container[str],
        following: Container[str] = (),
    ) -> Reading[bool]:
        """Whether an object of a call begins here, maybe in a list.

        Its first key is one of `keys`; the value of one of `names` is a known name, or else one of
        `following` is the second key.
        """
        feed = self.feed
        offset = yield from feed.space(offset)
        if (yield from feed.starts("[", offset)):
            offset = yield from feed.space(offset + 1)
        key = yield from self._quoted_word(offset, "{")
        if key is None or key[0] not in keys:
            return False
        if key[0] not in names and key[0] != TYPE_KEY:
            return (yield from feed.starts(":", (yield from feed.space(key[1]))))
        value = yield from self._quoted_word(key[1], ":")
        if value is None or key[0] not in names:
            return value is not None and value[0] == FUNCTION
        second = (yield from self._quoted_word(value[1], ",")) if following else None
        return self.types.has(value[0]) or (second is not None and second[0] in following)

    def _quoted_word(self, offset: int, sign: str) -> Reading[tuple[str, int] | None]:
        """Word in quotes after a sign, and the position after them."""
        feed = self.feed
        offset = yield from feed.space(offset)
        if not (yield from feed.starts(sign, offset)):
            return None
        offset = yield from feed.space(offset + len(sign))
        for quote in JSON.quotes:
            if (yield from feed.starts(quote, offset)):
                end = yield from feed.after(_PLAIN, offset + 1)
                is_closed = yield from feed.starts(quote, end)
                if is_closed:
                    return (feed.text[offset + 1 : end], end + 1)
                return None
        return None


class JsonCalls:
    """Tells the calls of JSON while it is copied.

    A call opens where its arguments begin, if its name stands before them, and its id too where the
    format writes one. None opens if it `is_stuck`: calls before these are untold.
    """

    def __init__(
        self,
        body: JsonBody,
        offset: int,
        stops: tuple[str, ...],
        writer: CallWriter,
        *,
        is_stuck: bool,
    ) -> None:
        self.copier = ValueCopier(offset, JSON, stops, on_begin=self._begin, on_end=self._end)
        self.told_end = offset
        """End of the last call of a list that was told."""

        self._body = body
        self._writer = writer
        self._name_paths = tuple(path for path in (body.name, *NAME_PATHS) if path)
        self._argument_paths = (*((body.arguments,) if body.name else ()), *ARGUMENT_PATHS)
        self._is_list = False
        self._is_stuck = is_stuck
        self._fields: dict[Path, str] = {}
        self._starts: dict[Path, int] = {}
        self._arguments: Path | None = None

    def _begin(self, path: Path, sign: str) -> None:
        if not path:
            self._is_list = sign == "["
        inner = path[self._is_list :]
        if path and not inner:
            self._fields = {}
            self._starts = {}
            self._arguments = None
        if sign in JSON.quotes and (inner in self._name_paths or inner == self._body.id):
            self._starts[inner] = len(self.copier.written)
        elif sign == "{" and self._arguments is None and self._is_arguments(inner):
            name = self._name(inner)
            is_told = bool(name) and self._writer.open(name, self._fields.get(self._body.id, ""))
            if is_told:
                self._arguments = inner
                self._writer.copy(self.copier, len(path))

    def _end(self, path: Path) -> None:
        inner = path[self._is_list :]
        start = self._starts.pop(inner, -1)
        if start >= 0 and inner not in self._fields and self.copier.written[start:]:
            self._fields[inner] = json.loads(self.copier.written[start:])
        if inner == self._arguments and self._writer.is_open:
            self._writer.end()
        if not inner and (path or not self._is_list) and self._arguments is None:
            # Later calls have to wait for this one.
            self._is_stuck = True
        elif path and not inner:
            self.told_end = self.copier.offset

    def _is_arguments(self, inner: Path) -> bool:
        if self._is_stuck or (self._body.id and self._body.id not in self._fields):
            return False
        if not self._body.name:
            return len(inner) == 1
        return inner in self._argument_paths

    def _name(self, inner: Path) -> str:
        if not self._body.name:
            return str(inner[0])
        return next((self._fields[path] for path in self._name_paths if path in self._fields), "")


def _json_call(body: JsonBody, item: Any) -> ToolCall:
    if not body.name:
        ((name, arguments),) = item.items()
        return checked_call(name, None, arguments)
    inner = item.get(FUNCTION)
    function = inner if isinstance(inner, dict) else item
    name = _at(item, body.name) or _first(function, NAME_KEYS)
    arguments = _at(item, body.arguments)
    if arguments is None:
        arguments = _first(function, ARGUMENT_KEYS)
    if arguments is None and not ARGUMENT_KEYS & function.keys():
        own_keys = {*NAME_KEYS, *body.name, *body.id, TYPE_KEY, "id"}
        arguments = {key: value for key, value in function.items() if key not in own_keys}
    return checked_call(name, _at(item, body.id) if body.id else None, arguments)


def _first(value: dict[str, Any], keys: Iterable[str]) -> Any:
    """The first value of some keys; None without any."""
    return next((value[key] for key in sorted(keys) if value.get(key) is not None), None)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
