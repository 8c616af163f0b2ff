"""Copies a value of a growing text as JSON, piece by piece."""

import re
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct, field

from mlxstack.text.formats.checked_calls import UNREADABLE
from mlxstack.text.formats.notations import JSON, Notation
from mlxstack.text.formats.text_feed import MarkSet
from mlxstack.text.normalize_messages import writable

MAX_DEPTH = 100
"""Deeper values are not copied, but read as a whole."""

LEAST_NESTED = 2
"""Frames around a value that is no argument of a Python call."""

DECIDING = 64
"""The most characters that decide whether a value is text."""

MAX_SCALAR = 400
"""The most characters of a number or constant."""

CLOSERS = {"{": "}", "[": "]", "(": ")"}
_SPACE, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[,\s]*")
_LAST_CLOSERS = re.compile(r"[\"'][\s\]})]*\Z")
_KEYWORD, _BEGUN_KEYWORD = re.compile(r"(\w+)\s*=(?!=)"), re.compile(r"\w*\s*=?\Z")
_BARE_NAME = re.compile(r"[^:,<{}\[\]]*")
_ITEM, _MEMBER = re.compile(r"[\"'{\[\]\-\w(]"), re.compile(r"[\"'}]")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_N_DIGITS = {"u": 4, "x": 2}

Path = tuple[str | int, ...]


class Frame(Struct):
    """Open container; `key` is that of the current value."""

    opens: str
    key: str | int = -1
    keys: set[str] = field(default_factory=set)
    is_muted: bool = False


class TypedArguments(Protocol):
    """Types of arguments that may be text without quotes."""

    def is_copied(self, key: str, sign: str) -> bool:
        """Whether a value that begins so means what it says."""

    def is_bare(self, key: str, begun: str) -> bool:
        """Whether such a beginning is surely text without quotes."""

    def declares(self, key: str) -> bool:
        """Whether the tool has an argument of this name."""

    def offers(self, name: str) -> bool:
        """Whether a tool of this name is offered."""


class ValueCopier:
    """Copies one value, from `at` on, to `written`.

    All that is written is the beginning of one JSON value: `closing` completes it at any time. A
    key that comes again is left out with its value. `is_done`: the value has ended at `at`;
    `is_broken`: the text at `at` is no such value. One of `stops` in a text is a part of it only if
    the text is closed after it. With `arguments` the value is those of a call, in parentheses
    or braces. Without `has_scalars`, it must be a container or a text; without `has_texts`, no
    text either.

    `on_begin` gets the path of each value and its first character, before it is written; `on_end`
    gets the path.
    """

    def __init__(
        self,
        at: int,
        notation: Notation = JSON,
        stops: tuple[str, ...] = (),
        *,
        arguments: TypedArguments | None = None,
        has_scalars: bool = True,
        has_texts: bool = True,
        on_begin: Callable[[Path, str], None] | None = None,
        on_end: Callable[[Path], None] | None = None,
    ) -> None:
        self.at = at
        self.written = ""
        self.is_done = self.is_broken = False
        self._notation = notation
        self._arguments, self._bare_at, self._is_loose = arguments, at, notation.has_bare_keys
        self._has_scalars, self._has_texts = has_scalars, has_texts
        self._stops = stops
        self._on_begin, self._on_end = on_begin, on_end
        self._frames: list[Frame] = []
        self._step: Callable[[], bool] = self._value
        self._quote, self._is_key, self._key_text = "", False, ""
        self._is_text_open = self._has_break = False
        self._closing_at = self._no_closing_to = self._held = -1
        self._text, self._is_final = "", False
        self._marks = {
            quote: MarkSet([quote, *stops, *(["\\"] if notation.escapes else [])])
            for quote in notation.quotes
        }

    def read(self, text: str, *, is_final: bool) -> None:
        """Copy all that is certain of the whole text so far."""
        self._text, self._is_final = text, is_final
        while not (self.is_done or self.is_broken) and self._step():
            pass

    def closing(self, rest: str, depth: int = 0) -> str:
        """Text that completes the JSON inside of `depth` containers.

        A text that is still open goes on with `rest`, without the last quote and brackets.
        """
        frames = self._frames[depth : self._muted_depth()]
        last = escaped(_LAST_CLOSERS.sub("", rest)) + '"' if self._is_text_open else ""
        return last + "".join("]" if frame.opens == "[" else "}" for frame in reversed(frames))

    def _value(self) -> bool:
        """Begin a value."""
        if not self._skip(_SPACE):
            return False
        sign = self._text[self.at]
        arguments = self._arguments
        if arguments is not None and len(self._frames) < LEAST_NESTED:
            if not self._frames:
                return self._open(sign) if sign in "({" else self._break()
            if not arguments.is_copied(str(self._frames[0].key), sign):
                return self._break() if sign in self._notation.quotes else self._go(self._bare)
        return self._typed_value(sign)

    def _typed_value(self, sign: str) -> bool:
        """Begin a text, a container or a scalar."""
        quote = self._starting_quote()
        if quote is None:
            return False
        if quote:
            return self._begin_text(sign, quote)
        if sign in "{[":
            return self._open(sign)
        return self._scalar() if self._has_scalars or self._frames else self._break()

    def _begin_text(self, sign: str, quote: str) -> bool:
        if not (self._has_texts or self._frames):
            return self._break()
        self._begin(sign)
        self._write('"')
        self.at += len(quote)
        self._quote, self._is_key, self._has_break = quote, False, False
        self._is_text_open = self._muted_depth() is None
        return self._go(self._in_text)

    def _bare(self) -> bool:
        """Begin a text without quotes, once it is certain."""
        assert self._arguments is not None
        start = self.at if self._is_loose else self._bare_at
        end = self._bare_end(start)
        begun = self._text[start : self._held if end < 0 else end][:DECIDING]
        if not self._arguments.is_bare(str(self._frames[0].key), begun):
            is_other = end >= 0 or self._is_final or len(begun) == DECIDING
            return is_other and (self._scalar() if self._notation.has_bare_keys else self._break())
        self.at = start
        self._begin(begun[0])
        self._write('"')
        self._is_text_open, self._is_key = self._muted_depth() is None, False
        return self._go(self._in_bare)

    def _in_bare(self) -> bool:
        """The next stretch of a text without quotes."""
        end = self._bare_end(self.at)
        stop = self._held if end < 0 else end
        self._add(self._text[self.at : stop])
        self.at = stop
        if end < 0:
            return self._is_final and self._break()
        self._write('"')
        self._is_text_open = False
        return self._end()

    def _bare_end(self, at: int) -> int:
        """End of a text without quotes; -1: certain up to `_held`."""
        arguments, bare = self._arguments, self._notation.bare
        assert arguments is not None and bare is not None
        for match in bare.end.finditer(self._text, at):
            self._held = match.start()
            if not self._is_final and bare.begun.match(self._text, match.start()):
                return -1
            after = bare.after.match(self._text, match.start())
            if after is not None and (
                after.lastgroup is None
                or (after["key"] and arguments.declares(after["key"]))
                or (after["name"] and arguments.offers(after["name"]))
            ):
                return match.start()
        self._held = len(self._text) if self._is_final else max(at, len(self._text.rstrip()))
        return -1

    def _starting_quote(self) -> str | None:
        """Quote at this position; "" without one, None if undecided."""
        for quote in self._notation.quotes:
            if self._text.startswith(quote, self.at):
                return quote
            if not self._is_final and quote.startswith(self._text[self.at :]):
                return None
        return ""

    def _open(self, sign: str) -> bool:
        if len(self._frames) == MAX_DEPTH:
            return self._break()
        self._begin(sign)
        self._write("[" if sign == "[" else "{")
        self.at += 1
        self._frames.append(Frame(sign))
        return self._go(self._member)

    def _scalar(self) -> bool:
        notation = self._notation
        match = notation.scalar_text.match(self._text, self.at)
        end = match.end() if match else self.at
        if end == len(self._text) and not self._is_final:
            return end - self.at > MAX_SCALAR and not notation.has_bare_keys and self._break()
        try:
            value = notation.scalar(self._text[self.at : end])
        except UNREADABLE:
            return self._break()
        if not isinstance(value, str) and end - self.at > MAX_SCALAR:
            return self._break()
        self._begin(self._text[self.at])
        self._write(msgspec.json.encode(value).decode())
        self.at = end
        return self._end()

    def _member(self) -> bool:
        """The next item or key of a container, or its end."""
        if not self._skip(_SPACE if self._notation.has_commas else _SEPARATORS):
            return False
        frame = self._frames[-1]
        if self._text[self.at] == CLOSERS[frame.opens]:
            return self._close()
        if isinstance(frame.key, int) and frame.opens == "[":
            frame.key += 1
            return self._go(self._value)
        return self._keyword() if frame.opens == "(" else self._key()

    def _key(self) -> bool:
        """A key of an object."""
        quote = self._starting_quote()
        if quote is None:
            return False
        if quote:
            self.at += len(quote)
            self._quote, self._is_key, self._key_text = quote, True, ""
            return self._go(self._in_text)
        return self._bare_key() if self._notation.has_bare_keys else self._break()

    def _keyword(self) -> bool:
        match = _KEYWORD.match(self._text, self.at)
        if match is not None and (match.end() < len(self._text) or self._is_final):
            self.at = self._bare_at = match.end()
            self._is_loose = match[0][-2].isspace()
            return self._begin_member(match[1])
        return (self._is_final or not _BEGUN_KEYWORD.match(self._text, self.at)) and self._break()

    def _bare_key(self) -> bool:
        end = _BARE_NAME.match(self._text, self.at).end()  # type: ignore[union-attr]
        if end == len(self._text) and not self._is_final:
            return False
        if self._text[end : end + 1] != ":":
            return self._break()
        key = self._text[self.at : end].strip().strip('"')
        self.at = end + 1
        return self._begin_member(key)

    def _colon(self) -> bool:
        if not self._skip(_SPACE):
            return False
        if self._text[self.at] != ":":
            return self._break()
        self.at += 1
        return self._begin_member(self._key_text)

    def _begin_member(self, key: str) -> bool:
        frame = self._frames[-1]
        frame.key = writable(key)
        frame.is_muted = frame.key in frame.keys
        return self._go(self._value)

    def _in_text(self) -> bool:
        """The next stretch of a text or key."""
        text, marks = self._text, self._marks[self._quote]
        mark = marks.search(text, self.at, is_final=self._is_final)
        end = mark.start if mark else len(text) if self._is_final else marks.hold(text, self.at)
        self._add(text[self.at : end])
        self._has_break = self._has_break or "\n" in text[self.at : end]
        self.at = end
        if mark is None:
            return self._is_final and self._break()
        if mark.text == self._quote:
            return self._end_text()
        if mark.text == "\\":
            return self._escape()
        return self._pass_stop(mark.end)

    def _add(self, text: str) -> None:
        """Add characters to the text or key."""
        if self._is_key:
            self._key_text += text
        elif text:
            self._write(escaped(text))

    def _escape(self) -> bool:
        """A character after a backslash; one that means nothing keeps the backslash."""
        text, at = self._text, self.at + 1
        if self._has_break and self._notation.is_raw_after_break:
            self._add("\\")
            self.at = at
            return True
        if at == len(text):
            return self._is_final and self._break()
        letter = text[at]
        n_digits = _N_DIGITS.get(letter, 0)
        end = at + 1 + n_digits
        if n_digits and end > len(text) and not self._is_final:
            return False
        digits = text[at + 1 : end]
        if n_digits and re.fullmatch(rf"[0-9a-fA-F]{{{n_digits}}}", digits):
            code = int(digits, 16)
            if 0xD800 <= code < 0xDC00:
                low = _LOW_SURROGATE.match(text, end)
                if low is None and not self._is_final and len(text) - end < 6:
                    return False
                if low is not None:
                    code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
                    end = low.end()
            self._add(writable(chr(code)))
            self.at = end
            return True
        self._add(self._notation.escapes.get(letter, "\\" + letter))
        self.at = at + 1
        return True

    def _pass_stop(self, end: int) -> bool:
        """Pass a mark inside a text that a later quote closes."""
        if self._closing_at < end:
            closing = re.compile(rf"{re.escape(self._quote)}\s*[,\]}})]")
            match = closing.search(self._text, max(end, self._closing_at, self._no_closing_to))
            if match is None:
                self._no_closing_to = max(end, len(self._text) - len(self._quote) - 1)
                while self._no_closing_to > end and self._text[self._no_closing_to - 1].isspace():
                    self._no_closing_to -= 1
                return self._is_final and self._break()
            self._closing_at = match.end()
        self._add(self._text[self.at : end])
        self.at = end
        return True

    def _end_text(self) -> bool:
        if self._is_key:
            self.at += len(self._quote)
            return self._go(self._colon)
        is_end = self._closes(self.at + len(self._quote))
        if not is_end:
            return is_end is not None and self._break()
        self.at += len(self._quote)
        self._write('"')
        self._is_text_open = False
        return self._end()

    def _closes(self, at: int) -> bool | None:
        """Whether a quote before `at` ends its text; None: undecided."""
        if self._notation.has_certain_quotes or not self._frames:
            return True
        opens = self._frames[-1].opens
        for is_first in (True, False):
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if at == len(self._text):
                return True if self._is_final else None
            if self._text[at] == CLOSERS[opens]:
                return True
            if is_first and self._text[at] != ",":
                return False
            at += is_first
        if opens != "(":
            return (_ITEM if opens == "[" else _MEMBER).match(self._text, at) is not None
        is_open = not self._is_final and _BEGUN_KEYWORD.match(self._text, at) is not None
        return None if is_open else _KEYWORD.match(self._text, at) is not None

    def _after(self) -> bool:
        """A comma or the end of the container."""
        frame = self._frames[-1]
        if not self._notation.has_commas:
            return self._go(self._member)
        if not self._skip(_SPACE):
            return False
        if self._text[self.at] == CLOSERS[frame.opens]:
            return self._close()
        if self._text[self.at] == ",":
            self.at += 1
        elif frame.opens + self._text[self.at] != "[{":
            # Only objects of a list may stand without a comma.
            return self._break()
        return self._go(self._member)

    def _close(self) -> bool:
        frame = self._frames[-1]
        frame.is_muted = False
        self.at += 1
        self._write("]" if frame.opens == "[" else "}")
        self._frames.pop()
        return self._end()

    def _begin(self, sign: str) -> None:
        """Write the comma and the key before a value."""
        frame = self._frames[-1] if self._frames else None
        if frame is not None and isinstance(frame.key, str) and not frame.is_muted:
            comma = "," if frame.keys else ""
            self._write(f'{comma}"{escaped(frame.key)}":')
            frame.keys.add(frame.key)
        elif frame is not None and isinstance(frame.key, int) and frame.key > 0:
            self._write(",")
        if self._on_begin is not None:
            self._on_begin(self._path(), sign)

    def _end(self) -> bool:
        """End a value."""
        if self._on_end is not None:
            self._on_end(self._path())
        if self._frames:
            self._frames[-1].is_muted = False
            return self._go(self._after)
        self.is_done = True
        return True

    def _path(self) -> Path:
        return tuple(frame.key for frame in self._frames)

    def _muted_depth(self) -> int | None:
        """Number of containers up to one whose value is left out."""
        return next((at + 1 for at, one in enumerate(self._frames) if one.is_muted), None)

    def _write(self, text: str) -> None:
        if self._muted_depth() is None:
            self.written += text

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Whether there is a character after what the pattern matches."""
        match = pattern.match(self._text, self.at)
        self.at = match.end() if match else self.at
        is_there = self.at < len(self._text)
        self.is_broken = self.is_broken or (self._is_final and not is_there)
        return is_there

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _break(self) -> bool:
        self.is_broken = True
        return True


def escaped(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return msgspec.json.encode(writable(text)).decode()[1:-1]
