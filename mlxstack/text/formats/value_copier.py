"""Copies a value of a growing text as JSON, piece by piece."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from mlxstack.text.formats.argument_values import CalledArguments
from mlxstack.text.formats.checked_calls import UNREADABLE
from mlxstack.text.formats.notations import JSON, Notation
from mlxstack.text.formats.text_feed import MarkSet, Reading, TextFeed
from mlxstack.text.normalize_messages import writable

MAX_DEPTH = 100
"""Deeper values are not copied, but read as a whole."""

MIN_NESTED = 2
"""Frames around a value that is no argument of a Python call."""

DECIDING = 64
"""The most characters that decide whether a value is text."""

MAX_SCALAR = 400
"""The most characters of a number or constant."""

CLOSERS = {"{": "}", "[": "]", "(": ")"}
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[,\s]*")
_LAST_CLOSERS = re.compile(r"[\"'][\s\]})]*\Z")
_KEYWORD = re.compile(r"([\w$-]+)\s*=(?!=)")
_BEGUN_KEYWORD = re.compile(r"[\w$-]*\s*=?\Z")
_BARE_NAME = re.compile(r"[^:,<{}\[\]]*")
_FOLLOWING = {"[": re.compile(r"[\"'{\[\]\-\w(]"), "{": re.compile(r"[\"'}]"), "(": _KEYWORD}
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_N_DIGITS = {"u": 4, "x": 2}

Path = tuple[str | int, ...]


class Frame(Struct):
    """Open container; `key` is that of the current value."""

    opens: str
    key: str | int = -1
    keys: set[str] = field(default_factory=set)
    is_muted: bool = False


class BrokenValue(Exception):
    """The text is no value of the notation."""


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
        arguments: CalledArguments | None = None,
        has_scalars: bool = True,
        has_texts: bool = True,
        on_begin: Callable[[Path, str], None] | None = None,
        on_end: Callable[[Path], None] | None = None,
    ) -> None:
        self.at = at
        self.written = ""
        self.is_done = self.is_broken = False
        self._notation = notation
        self._arguments = arguments
        self._bare_at = at
        self._is_loose = notation.has_bare_keys
        self._has_scalars = has_scalars
        self._has_texts = has_texts
        self._on_begin = on_begin
        self._on_end = on_end
        self._frames: list[Frame] = []
        self._is_text_open = False
        self._closing_at = -1
        self._feed = TextFeed()
        self._marks = {
            quote: MarkSet([quote, *stops, *(["\\"] if notation.escapes else [])])
            for quote in notation.quotes
        }
        self._steps = self._copy()

    def read(self, text: str, *, is_final: bool) -> None:
        """Copy all that is certain of the whole text so far."""
        self._feed.text = text
        self._feed.is_final = is_final
        next(self._steps, None)

    def closing(self, rest: str, depth: int = 0) -> str:
        """Text that completes the JSON inside of `depth` containers.

        A text that is still open goes on with `rest`, without the last quote and brackets.
        """
        frames = self._frames[depth : self._muted_depth()]
        last = escaped(_LAST_CLOSERS.sub("", rest)) + '"' if self._is_text_open else ""
        return last + "".join("]" if frame.opens == "[" else "}" for frame in reversed(frames))

    def _copy(self) -> Reading[None]:
        try:
            yield from self._value()
            self.is_done = True
        except BrokenValue:
            self.is_broken = True

    def _value(self) -> Reading[None]:
        sign = yield from self._skip(_SPACE)
        if (arguments := self._arguments) is not None and not self._frames:
            if sign not in "({":
                raise BrokenValue
            yield from self._container(sign)
        elif (
            arguments is not None
            and len(self._frames) < MIN_NESTED
            and not arguments.is_copied(str(self._frames[0].key), sign)
        ):
            if sign in self._notation.quotes:
                raise BrokenValue
            yield from self._bare(arguments)
        else:
            yield from self._typed_value(sign)
        if self._on_end is not None:
            self._on_end(self._path())
        if self._frames:
            self._frames[-1].is_muted = False

    def _typed_value(self, sign: str) -> Reading[None]:
        """A text, a container or a scalar."""
        if quote := (yield from self._starting_quote()):
            if not (self._has_texts or self._frames):
                raise BrokenValue
            self._open_text(sign)
            yield from self._letters(quote, self._add, is_key=False)
            self._close_text()
        elif sign in "{[":
            yield from self._container(sign)
        elif self._has_scalars or self._frames:
            yield from self._scalar()
        else:
            raise BrokenValue

    def _starting_quote(self) -> Reading[str]:
        """Quote at this position, which is passed; "" without one."""
        for quote in self._notation.quotes:
            if (yield from self._feed.starts(quote, self.at)):
                self.at += len(quote)
                return quote
        return ""

    def _bare(self, arguments: CalledArguments) -> Reading[None]:
        """A text without quotes, once it is certain."""
        feed = self._feed
        start = self.at if self._is_loose else self._bare_at
        while True:
            stop, is_end = self._bare_end(arguments, start)
            begun = feed.text[start:stop][:DECIDING]
            if arguments.is_bare(str(self._frames[0].key), begun):
                break
            if is_end or feed.is_final or len(begun) == DECIDING:
                if not self._notation.has_bare_keys:
                    raise BrokenValue
                yield from self._scalar()
                return
            yield
        self.at = start
        self._open_text(begun[0])
        while True:
            self._add(feed.text[self.at : stop])
            self.at = stop
            if is_end:
                break
            yield from self._more()
            stop, is_end = self._bare_end(arguments, self.at)
        self._close_text()

    def _bare_end(self, arguments: CalledArguments, at: int) -> tuple[int, bool]:
        """End of a text without quotes, or else of its certain part."""
        bare = self._notation.bare
        text = self._feed.text
        is_final = self._feed.is_final
        assert bare is not None
        for match in bare.end.finditer(text, at):
            if not is_final and bare.begun.match(text, match.start()):
                return match.start(), False
            after = bare.after.match(text, match.start())
            if after is not None and (
                after.lastgroup is None
                or (after["key"] and arguments.declares(after["key"]))
                or (after["name"] and arguments.offers(after["name"]))
            ):
                return match.start(), True
        return len(text) if is_final else max(at, len(text.rstrip())), False

    def _scalar(self) -> Reading[None]:
        notation = self._notation
        feed = self._feed
        while True:
            match = notation.scalar_text.match(feed.text, self.at)
            end = match.end() if match else self.at
            is_long = end - self.at > MAX_SCALAR
            if end < len(feed.text) or feed.is_final:
                break
            if is_long and not notation.has_bare_keys:
                raise BrokenValue
            yield
        try:
            value = notation.scalar(feed.text[self.at : end])
        except UNREADABLE:
            raise BrokenValue from None
        if is_long and not isinstance(value, str):
            raise BrokenValue
        self._begin(feed.text[self.at])
        self._write(msgspec.json.encode(value).decode())
        self.at = end

    def _container(self, opens: str) -> Reading[None]:
        """A list, an object or the arguments of a call."""
        if len(self._frames) == MAX_DEPTH:
            raise BrokenValue
        self._begin(opens)
        self._write("[" if opens == "[" else "{")
        self.at += 1
        self._frames.append(frame := Frame(opens))
        has_commas = self._notation.has_commas
        closes = CLOSERS[opens]
        while (yield from self._skip(_SPACE if has_commas else _SEPARATORS)) != closes:
            if isinstance(frame.key, int) and opens == "[":
                frame.key += 1
            else:
                frame.key = writable((yield from self._keyword() if opens == "(" else self._key()))
                frame.is_muted = frame.key in frame.keys
            yield from self._value()
            sign = (yield from self._skip(_SPACE)) if has_commas else closes
            if sign == ",":
                self.at += 1
            elif sign != closes and opens + sign != "[{":
                # Only objects of a list may stand without a comma.
                raise BrokenValue
        self.at += 1
        self._write("]" if opens == "[" else "}")
        self._frames.pop()

    def _key(self) -> Reading[str]:
        """A key of an object, whose colon is passed."""
        letters: list[str] = []
        if quote := (yield from self._starting_quote()):
            yield from self._letters(quote, letters.append, is_key=True)
            end = yield from self._feed.after(_SPACE, self.at)
        elif self._notation.has_bare_keys:
            end = yield from self._feed.after(_BARE_NAME, self.at)
            letters.append(self._feed.text[self.at : end].strip().strip('"'))
        else:
            raise BrokenValue
        if self._feed.text[end : end + 1] != ":":
            raise BrokenValue
        self.at = end + 1
        return "".join(letters)

    def _keyword(self) -> Reading[str]:
        feed = self._feed
        while True:
            match = _KEYWORD.match(feed.text, self.at)
            if match is not None and (match.end() < len(feed.text) or feed.is_final):
                self.at = self._bare_at = match.end()
                self._is_loose = match[0][-2].isspace()
                return match[1]
            if not _BEGUN_KEYWORD.match(feed.text, self.at):
                raise BrokenValue
            yield from self._more()

    def _letters(self, quote: str, add: Callable[[str], Any], *, is_key: bool) -> Reading[None]:
        """The letters of a text or key, and its last quote."""
        feed = self._feed
        marks = self._marks[quote]
        has_break = False
        while True:
            mark = marks.search(feed.text, self.at, is_final=feed.is_final)
            last = len(feed.text) if feed.is_final else marks.hold(feed.text, self.at)
            stretch = feed.text[self.at : mark.start if mark else last]
            add(stretch)
            self.at += len(stretch)
            has_break = has_break or "\n" in stretch
            if mark is None:
                yield from self._more()
            elif mark.text == "\\":
                is_raw = has_break and self._notation.is_raw_after_break
                add("\\" if is_raw else (yield from self._escape()))
                self.at += is_raw
            elif mark.text != quote:
                yield from self._pass_stop(quote, mark.end)
                add(mark.text)
                self.at = mark.end
            elif is_key or (yield from self._closes(mark.end)):
                self.at = mark.end
                return
            else:
                raise BrokenValue

    def _escape(self) -> Reading[str]:
        """A character after a backslash; one that means nothing keeps the backslash."""
        feed = self._feed
        at = self.at + 1
        while at == len(feed.text):
            yield from self._more()
        letter = feed.text[at]
        n_digits = _N_DIGITS.get(letter, 0)
        end = at + 1 + n_digits
        yield from self._until(end)
        digits = feed.text[at + 1 : end]
        if not (n_digits and re.fullmatch(rf"[0-9a-fA-F]{{{n_digits}}}", digits)):
            self.at = at + 1
            return self._notation.escapes.get(letter, "\\" + letter)
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00:
            yield from self._until(end + 6)
            if (low := _LOW_SURROGATE.match(feed.text, end)) is not None:
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
                end = low.end()
        self.at = end
        return str(writable(chr(code)))

    def _pass_stop(self, quote: str, end: int) -> Reading[None]:
        """Pass a mark inside a text that a later quote closes."""
        closing = re.compile(rf"{re.escape(quote)}\s*[,\]}})]")
        scan = max(end, self._closing_at)
        while self._closing_at < end:
            if match := closing.search(self._feed.text, scan):
                self._closing_at = match.end()
            else:
                scan = max(end, len(self._feed.text.rstrip()) - len(quote))
                yield from self._more()

    def _closes(self, at: int) -> Reading[bool]:
        """Whether a quote before `at` ends its text."""
        if self._notation.has_certain_quotes or not self._frames:
            return True
        feed = self._feed
        opens = self._frames[-1].opens
        for is_first in (True, False):
            at = yield from feed.space(at)
            if feed.text[at : at + 1] in ("", CLOSERS[opens]):
                return True
            if is_first and feed.text[at] != ",":
                return False
            at += is_first
        while opens == "(" and not feed.is_final and _BEGUN_KEYWORD.match(feed.text, at):
            yield
        return _FOLLOWING[opens].match(feed.text, at) is not None

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

    def _open_text(self, sign: str) -> None:
        self._begin(sign)
        self._write('"')
        self._is_text_open = self._muted_depth() is None

    def _close_text(self) -> None:
        self._write('"')
        self._is_text_open = False

    def _add(self, text: str) -> None:
        """Add letters to the text."""
        self._write(escaped(text))

    def _path(self) -> Path:
        return tuple(frame.key for frame in self._frames)

    def _muted_depth(self) -> int | None:
        """Number of containers up to one whose value is left out."""
        return next((at + 1 for at, one in enumerate(self._frames) if one.is_muted), None)

    def _write(self, text: str) -> None:
        if self._muted_depth() is None:
            self.written += text

    def _skip(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The character after what the pattern matches."""
        self.at = yield from self._feed.after(pattern, self.at)
        if self.at == len(self._feed.text):
            raise BrokenValue
        return self._feed.text[self.at]

    def _until(self, end: int) -> Reading[None]:
        """Wait for so many characters, or for the end of the text."""
        while len(self._feed.text) < end and not self._feed.is_final:
            yield

    def _more(self) -> Reading[None]:
        """Wait for more text, which a broken value never gets."""
        if self._feed.is_final:
            raise BrokenValue
        yield


def escaped(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return msgspec.json.encode(writable(text)).decode()[1:-1]
