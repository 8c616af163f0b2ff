"""Writes tool calls as events, with arguments in pieces of JSON."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from mlxstack.core.conversation import ToolCall
from mlxstack.core.response_parts import ArgumentsPart, ToolCallPart, ToolCallStarted
from mlxstack.features.formats.argument_values import ArgumentTypes
from mlxstack.features.formats.checked_calls import plain
from mlxstack.features.formats.text_feed import MarkSet, TextFeed
from mlxstack.features.formats.values import DECIDING, ValueCopier, escaped

CallEvent = ToolCallStarted | ArgumentsPart | ToolCallPart
"""Part of a call; its id is the model's own or ""."""


class TextCopier:
    """Copies the bare text of an argument as a text of JSON.

    `is_text` says of the beginning of a value whether it can be nothing but text. White space at
    the end is held back.
    """

    is_done = is_broken = False

    def __init__(self, offset: int, is_text: Callable[[str], bool]) -> None:
        self.offset = offset
        self.written = ""
        self._is_text = is_text

    def read(self, text: str, *, is_final: bool) -> None:
        """Copy all that is certain of the whole text so far."""
        del is_final
        end = len(text.rstrip()) if text[-1:].isspace() else len(text)
        if end <= self.offset or not (
            self.written or self._is_text(text[self.offset : self.offset + DECIDING])
        ):
            return
        self.written += ("" if self.written else '"') + escaped(text[self.offset : end])
        self.offset = end

    def closing(self, rest: str, depth: int = 0) -> str:
        """Text that completes the JSON, with the rest of the value."""
        del depth
        return escaped(rest.rstrip()) + '"'


Copier = ValueCopier | TextCopier


class CallWriter:
    """Writes the calls of a section in order, once certain.

    Nothing told is taken back: a call that is open stays one, and `close` completes its arguments.
    """

    def __init__(
        self, feed: TextFeed, emit: Callable[[CallEvent], None], types: ArgumentTypes
    ) -> None:
        self.is_quiet = False
        """Whether no call opens."""

        self.calls: list[ToolCall] = []
        """Calls that have ended since `begin`."""

        self._reached = 0
        self._feed = feed
        self._emit = emit
        self._types = types
        self._open: ToolCallStarted | None = None
        self._written = ""
        self._keys: set[str] = set()
        self._copier: Copier | None = None
        self._ends: MarkSet | None = None
        self._scan = self._n_copied = self._depth = 0
        self._prefix = ""
        self._is_members = False

    @property
    def is_open(self) -> bool:
        """Whether a call has opened and not ended."""
        return self._open is not None

    @property
    def is_told(self) -> bool:
        """Whether a call has opened since `begin`."""
        return self.is_open or bool(self.calls)

    def begin(self, offset: int) -> None:
        """Begin with the text at `offset`; nothing is open."""
        self.calls = []
        self._reached = offset

    def open(self, name: str, call_id: str = "") -> bool:
        """Whether a call of an offered tool is told from now on."""
        name = self._types.name(name)
        if self.is_quiet or self._open is not None or not self._types.has(name):
            return False
        self._open = ToolCallStarted(call_id, name)
        self._written = ""
        self._keys = set()
        self._copier = None
        self._is_members = True
        self._emit(self._open)
        return True

    def copy(self, copier: Copier, depth: int = 0) -> None:
        """Take the arguments from a copier, in `depth` containers, from now on."""
        self._copier = copier
        self._ends = None
        self._depth = depth
        self._is_members = False
        self._n_copied = len(copier.written)
        self._prefix = ""

    def begin_value(self, key: str, copier: Copier | None, ends: MarkSet | None = None) -> None:
        """Begin an argument that ends before one of `ends`."""
        # Of a key that comes again, the first value was sent.
        is_new = key not in self._keys
        self._copier = copier if is_new else None
        self._ends = ends
        self._scan = 0 if copier is None else copier.offset
        self._n_copied = 0
        self._prefix = f'{"," if self._keys else "{"}"{escaped(key)}":' if is_new else ""
        self._keys.add(key)

    def advance(self) -> None:
        """Tell what has become certain."""
        copier = self._copier
        if self._open is None or copier is None:
            return
        if self._ends is not None:
            text = self._feed.text
            mark = self._ends.search(text, self._scan, is_final=self._feed.is_final)
            self._scan = self._ends.hold(text, self._scan) if mark is None else mark.start
            copier.read(text[: self._scan], is_final=False)
        if len(copier.written) > self._n_copied:
            piece = self._prefix + copier.written[self._n_copied :]
            self._n_copied = len(copier.written)
            self._prefix = ""
            self._write(piece)

    def end_value(self, value: Any, end: int, reached: int) -> None:
        """End an argument at `end`; `value` counts unless another was written."""
        self._reached = reached
        if self._open is None or (self._copier is None and not self._prefix):
            return
        text = arguments_json(plain(value))
        copier = self._copier
        if isinstance(copier, ValueCopier):
            copier.read(self._feed.text[:end], is_final=True)
        if copier is not None and copier.is_done:
            text = copier.written
        elif copier is not None and not text.startswith(copier.written):
            text = copier.written + copier.closing(self._feed.text[copier.offset : end])
        self._write(self._prefix + text[self._n_copied :])
        self._copier = None
        self._prefix = ""

    def end(self) -> ToolCall:
        """End the open call, all of whose arguments were copied."""
        self.advance()
        if self._is_members:
            self._write("}" if self._keys else "{}")
        assert self._open is not None
        call = ToolCall(self._open.id, self._open.name, json.loads(self._written))
        self._open = None
        self._copier = None
        self.calls.append(call)
        self._emit(_ended(call, self._written))
        return call

    def close(self, end: int) -> tuple[ToolCall, ...]:
        """All calls; one that is open takes the text up to `end`."""
        if self._open is not None:
            self.advance()
            self._write(self._closing(end))
            self._is_members = False
            self._copier = None
            self.end()
        return tuple(self.calls)

    def cut(self) -> None:
        """End the open call as the end of the answer left it."""
        assert self._open is not None
        self.advance()
        arguments = json.loads(self._written + self._closing(0))
        call = ToolCall(self._open.id, self._open.name, arguments)
        self._open = None
        self._emit(_ended(call, self._written, is_cut=True))

    def emit(self, call: ToolCall) -> None:
        """Tell a whole call."""
        text = arguments_json(call.arguments)
        self._emit(ToolCallStarted(call.id, call.name))
        self._emit(ArgumentsPart(text))
        self._emit(_ended(call, text))

    @property
    def position(self) -> int:
        """The position up to which the text has been read."""
        if self._copier is None:
            return self._reached
        return max(self._reached, self._copier.offset)

    def _closing(self, end: int) -> str:
        """Text that completes the arguments with the text up to `end`."""
        copier = self._copier
        last = ""
        if copier is not None and copier.written and not self._prefix:
            last = copier.closing(self._feed.text[copier.offset : end], self._depth)
        if not self._is_members:
            return last
        return last + ("}" if self._written else "{}")

    def _write(self, text: str) -> None:
        if self._open is not None and text:
            self._written += text
            self._emit(ArgumentsPart(text))


def _ended(call: ToolCall, text: str, *, is_cut: bool = False) -> ToolCallPart:
    assert isinstance(call.arguments, dict)
    return ToolCallPart(call.id, call.name, call.arguments, text, is_cut)


def arguments_json(arguments: Any) -> str:
    """Arguments as every dialect sends them."""
    return msgspec.json.encode(arguments).decode()
