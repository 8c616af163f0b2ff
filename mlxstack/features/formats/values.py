"""Copies values of growing text as JSON, piece by piece."""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from mlxstack.features.formats.argument_values import argument_value, is_surely_text
from mlxstack.features.formats.checked_calls import UNREADABLE, plain
from mlxstack.features.formats.notations import JSON, Notation, TypedArguments
from mlxstack.features.formats.text_feed import MarkSet, Reading, TextFeed
from mlxstack.text.normalize_messages import writable

MAX_DEPTH = 100
"""Containers around a value."""

MAX_DOUBLED = 4
"""Braces that may be doubled around one object."""

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
_FOLLOWING = {"{": re.compile(r"[\"'}]|\w++\s*+:"), "(": _KEYWORD}
_FOLLOWING_ITEM = re.compile(r"[\"'{\[\]\-\w(]")
_HIGH = r"[dD][89abAB][0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rf"(?s)\\(?:u(?P<high>{_HIGH})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{{2}})"
    r"|u(?P<code>[0-9a-fA-F]{4})|x(?P<byte>[0-9a-fA-F]{2})|(?P<letter>.))"
)
_BEGUN_ESCAPE = re.compile(
    rf"\\(?:u(?:[0-9a-fA-F]{{0,3}}|{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?)|x[0-9a-fA-F]?)?\Z"
)

Path = tuple[str | int, ...]


class Frame(Struct):
    """Open container; `key` is that of the current value."""

    opens: str
    is_list: bool
    key: str | int = -1
    keys: set[str] = field(default_factory=set)
    is_positional: bool = True
    """Whether no argument was named."""

    is_muted: bool = False
    """A key that comes again: its value is left out."""


class BrokenValue(Exception):
    """The text is no value of the notation."""


class ValueCopier:
    """Copies one value, from `offset` on, to `written`.

    All that is written is the beginning of one JSON value: `closing` completes it at any time. A
    key that comes again is left out with its value. One of `stops` in a text is a part of it only
    if the text is closed after it. With `arguments` the value is those of a call, in parentheses or
    braces. Without `has_scalars`, it must be a container or a text; without `has_texts`, no text
    either.

    `on_begin` gets the path of each value and its first character, before it is written; `on_end`
    gets the path.
    """

    def __init__(
        self,
        offset: int,
        notation: Notation = JSON,
        stops: tuple[str, ...] = (),
        *,
        arguments: TypedArguments | None = None,
        has_scalars: bool = True,
        has_texts: bool = True,
        on_begin: Callable[[Path, str], None] | None = None,
        on_end: Callable[[Path], None] | None = None,
    ) -> None:
        self.offset = offset
        self.written = ""
        self.is_done = self.is_broken = False
        self._notation = notation
        self._arguments = arguments
        self._bare_at = offset
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

    def value(self) -> Any:
        """The whole value."""
        return json.loads(self.written)

    def closing(self, rest: str, depth: int = 0) -> str:
        """Text that completes the JSON inside of `depth` containers.

        A text that is still open goes on with `rest`, without the last quote and brackets.
        """
        frames = self._frames[depth : self._muted_depth()]
        last = ""
        if self._is_text_open:
            last = escaped(_LAST_CLOSERS.sub("", rest)) + '"'
        return last + "".join("]" if frame.is_list else "}" for frame in reversed(frames))

    def _copy(self) -> Reading[None]:
        try:
            yield from self._value()
            self.is_done = True
        except BrokenValue:
            self.is_broken = True

    def _value(self) -> Reading[None]:
        sign = yield from self._skip(_SPACE)
        if self._arguments is None or len(self._frames) > 1:
            yield from self._typed_value(sign)
        elif self._frames:
            yield from self._argument(self._arguments, sign)
        elif sign in "({":
            yield from self._container(sign)
        else:
            raise BrokenValue
        if self._on_end is not None:
            self._on_end(self._path())
        if self._frames:
            self._frames[-1].is_muted = False

    def _typed_value(self, sign: str) -> Reading[None]:
        """A text, a container or a scalar."""
        if quote := (yield from self._starting_quote()):
            if not (self._has_texts or self._frames):
                raise BrokenValue
            yield from self._text(sign, quote)
        elif sign in self._notation.containers:
            yield from self._container(sign, is_list=sign != "{")
        elif self._has_scalars or self._frames:
            yield from self._scalar()
        else:
            raise BrokenValue

    def _argument(self, arguments: TypedArguments, sign: str) -> Reading[None]:
        """A value of the arguments, whose type counts."""
        key = str(self._frames[0].key)
        if quote := (yield from self._starting_quote()):
            if arguments.is_spelled(key):
                letters: list[str] = []
                yield from self._letters(quote, letters.append, is_key=False)
                text = "".join(letters)
                self._write_value(argument_value(text, arguments.types_of(key)), sign)
            else:
                yield from self._text(sign, quote)
        elif arguments.is_bare(key, sign):
            yield from self._bare(arguments, key)
        elif sign in self._notation.containers:
            yield from self._container(sign, is_list=sign != "{" or arguments.is_set(key))
        else:
            yield from self._scalar()

    def _starting_quote(self) -> Reading[str]:
        """Quote at this position, which is passed; "" without one."""
        for quote in self._notation.quotes:
            if (yield from self._feed.starts(quote, self.offset)):
                self.offset += len(quote)
                return quote
        return ""

    def _text(self, sign: str, quote: str) -> Reading[None]:
        """The rest of a text after its first quote."""
        self._open_text(sign)
        yield from self._letters(quote, self._add, is_key=False)
        self._close_text()

    def _bare(self, arguments: TypedArguments, key: str) -> Reading[None]:
        """A text without quotes, once it is certain."""
        feed = self._feed
        start = self._bare_at
        while True:
            stop, is_end = self._bare_end(arguments, start)
            begun = feed.text[start:stop][:DECIDING]
            if is_surely_text(begun, arguments.types_of(key)):
                break
            if is_end or feed.is_final or len(begun) == DECIDING:
                yield from self._scalar()
                return
            yield
        self.offset = start
        self._open_text(begun[0])
        while True:
            self._add(feed.text[self.offset : stop])
            self.offset = stop
            if is_end:
                break
            yield from self._more()
            stop, is_end = self._bare_end(arguments, self.offset)
        self._close_text()

    def _bare_end(self, arguments: TypedArguments, offset: int) -> tuple[int, bool]:
        """End of a text without quotes, or else of its certain part."""
        bare = self._notation.bare
        text = self._feed.text
        is_final = self._feed.is_final
        assert bare is not None
        for match in bare.end.finditer(text, offset):
            if not is_final and bare.begun.match(text, match.start()):
                return match.start(), False
            after = bare.after.match(text, match.start())
            if after is not None and (
                after.lastgroup is None
                or (after["key"] and arguments.declares(after["key"]))
                or (after["name"] and arguments.offers(after["name"]))
            ):
                return match.start(), True
        return len(text) if is_final else max(offset, len(text.rstrip())), False

    def _scalar(self) -> Reading[None]:
        """A number or constant, or a whole argument without quotes."""
        notation = self._notation
        feed = self._feed
        while True:
            match = notation.scalar_text.match(feed.text, self.offset)
            end = match.end() if match else self.offset
            is_long = end - self.offset > MAX_SCALAR
            if end < len(feed.text) or feed.is_final:
                break
            if is_long and notation.has_commas:
                raise BrokenValue
            yield
        try:
            value = notation.scalar(feed.text[self.offset : end])
        except UNREADABLE:
            yield from self._spelled()
            return
        if is_long and not isinstance(value, str):
            raise BrokenValue
        self._write_value(value, feed.text[self.offset])
        self.offset = end

    def _spelled(self) -> Reading[None]:
        """An argument after its key that is neither quoted nor a scalar."""
        arguments = self._arguments
        is_named = len(self._frames) == 1 and not self._frames[0].is_positional
        if arguments is None or not is_named:
            raise BrokenValue
        end, is_end = self._bare_end(arguments, self.offset)
        while not is_end:
            yield from self._more()
            end, is_end = self._bare_end(arguments, end)
        text = self._feed.text[self.offset : end].rstrip()
        types = arguments.types_of(str(self._frames[0].key))
        self._write_value(argument_value(text, types), text[:1])
        self.offset = end

    def _container(self, opens: str, *, is_list: bool = False) -> Reading[None]:
        """A list, an object or the arguments of a call."""
        if len(self._frames) == MAX_DEPTH:
            raise BrokenValue
        self._begin(opens)
        self._write("[" if is_list else "{")
        self.offset += 1
        frame = Frame(opens, is_list)
        self._frames.append(frame)
        has_commas = self._notation.has_commas
        closes = CLOSERS[opens]
        n_doubled = yield from self._doubled(frame)
        while (yield from self._skip(_SPACE if has_commas else _SEPARATORS)) != closes:
            if isinstance(frame.key, int) and is_list:
                frame.key += 1
            else:
                key = yield from self._keyword(frame) if opens == "(" else self._key()
                frame.key = writable(key)
                frame.is_muted = frame.key in frame.keys
            yield from self._value()
            sign = (yield from self._skip(_SPACE)) if has_commas else closes
            if sign == ",":
                self.offset += 1
            elif sign != closes and opens + sign != "[{":
                # Only objects of a list may stand without a comma.
                raise BrokenValue
        self.offset += 1
        for _ in range(n_doubled):
            if (yield from self._skip(_SPACE)) != closes:
                raise BrokenValue
            self.offset += 1
        self._write("]" if is_list else "}")
        self._frames.pop()

    def _doubled(self, frame: Frame) -> Reading[int]:
        """Number of braces that follow the first one of an object."""
        n_doubled = 0
        if frame.opens != "{" or frame.is_list or not self._notation.has_commas:
            return 0
        while (yield from self._skip(_SPACE)) == "{" and n_doubled < MAX_DOUBLED:
            n_doubled += 1
            self.offset += 1
        return n_doubled

    def _key(self) -> Reading[str]:
        """A key of an object, whose colon is passed."""
        letters: list[str] = []
        if quote := (yield from self._starting_quote()):
            yield from self._letters(quote, letters.append, is_key=True)
            end = self.offset
        else:
            end = yield from self._feed.after(self._notation.bare_key, self.offset)
            letters.append(self._feed.text[self.offset : end].strip().strip('"'))
        end = yield from self._feed.after(_SPACE, end)
        if self._feed.text[end : end + 1] != ":":
            raise BrokenValue
        self.offset = self._bare_at = yield from self._feed.after(_SPACE, end + 1)
        return "".join(letters)

    def _keyword(self, frame: Frame) -> Reading[str]:
        """Name of an argument, by its keyword or its place."""
        feed = self._feed
        while True:
            match = _KEYWORD.match(feed.text, self.offset)
            if match is not None and (match.end() < len(feed.text) or feed.is_final):
                frame.is_positional = False
                self.offset = self._bare_at = match.end()
                if match[0][-2].isspace():
                    self._bare_at = yield from feed.space(self.offset)
                return match[1]
            if not _BEGUN_KEYWORD.match(feed.text, self.offset):
                break
            yield from self._more()
        name = ""
        if self._arguments is not None and frame.is_positional:
            name = self._arguments.positional(len(frame.keys))
        if not name:
            raise BrokenValue
        return name

    def _letters(self, quote: str, add: Callable[[str], Any], *, is_key: bool) -> Reading[None]:
        """The letters of a text or key, and its last quote."""
        feed = self._feed
        marks = self._marks[quote]
        is_raw = False
        may_be_raw = self._notation.has_bare_quotes and len(quote) == 1
        may_hold_quote = self._notation.has_bare_quotes and not self._frames[-1].is_positional
        while True:
            mark = marks.search(feed.text, self.offset, is_final=feed.is_final)
            last = len(feed.text) if feed.is_final else marks.hold(feed.text, self.offset)
            stretch = feed.text[self.offset : mark.start if mark else last]
            add(stretch)
            self.offset += len(stretch)
            is_raw = is_raw or (may_be_raw and "\n" in stretch)
            if mark is None:
                yield from self._more()
            elif mark.text == "\\":
                add("\\" if is_raw else (yield from self._escape()))
                self.offset += is_raw
            elif mark.text != quote:
                yield from self._pass_stop(quote, mark.end)
                add(mark.text)
                self.offset = mark.end
            elif is_key or (yield from self._closes(mark.end)):
                self.offset = mark.end
                return
            elif may_hold_quote:
                is_raw = True
                add(quote)
                self.offset = mark.end
            else:
                raise BrokenValue

    def _escape(self) -> Reading[str]:
        """A character after a backslash; one that means nothing keeps the backslash."""
        feed = self._feed
        while not feed.is_final and _BEGUN_ESCAPE.match(feed.text, self.offset):
            yield
        match = _ESCAPE.match(feed.text, self.offset)
        if match is None:
            raise BrokenValue
        self.offset = match.end()
        if match["high"]:
            return bytes.fromhex(match["high"] + match["low"]).decode("utf-16-be")
        if code := match["code"] or match["byte"]:
            return str(writable(chr(int(code, 16))))
        return self._notation.escapes.get(match["letter"], match[0])

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

    def _closes(self, offset: int) -> Reading[bool]:
        """Whether a quote before `offset` ends its text."""
        if self._notation.has_marks or not self._frames:
            return True
        feed = self._feed
        frame = self._frames[-1]
        for is_first in (True, False):
            offset = yield from feed.space(offset)
            if feed.text[offset : offset + 1] in ("", CLOSERS[frame.opens]):
                return True
            if is_first and feed.text[offset] != ",":
                return False
            offset += is_first
        if frame.is_list:
            return _FOLLOWING_ITEM.match(feed.text, offset) is not None
        while not feed.is_final and _BEGUN_KEYWORD.match(feed.text, offset):
            yield
        opens = frame.opens
        is_positional = opens == "(" and frame.is_positional
        return is_positional or _FOLLOWING[opens].match(feed.text, offset) is not None

    def _begin(self, sign: str) -> None:
        """Write the comma and the key before a value."""
        frame = self._frames[-1] if self._frames else None
        if frame is not None and isinstance(frame.key, str) and not frame.is_muted:
            comma = ""
            if frame.keys:
                comma = ","
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

    def _write_value(self, value: Any, sign: str) -> None:
        """Write a value that was read as a whole."""
        self._begin(sign)
        self._write(msgspec.json.encode(plain(value)).decode())

    def _path(self) -> Path:
        return tuple(frame.key for frame in self._frames)

    def _muted_depth(self) -> int | None:
        """Number of containers up to one whose value is left out."""
        depths = (depth for depth, frame in enumerate(self._frames, 1) if frame.is_muted)
        return next(depths, None)

    def _write(self, text: str) -> None:
        if self._muted_depth() is None:
            self.written += text

    def _skip(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The character after what the pattern matches."""
        self.offset = yield from self._feed.after(pattern, self.offset)
        if self.offset == len(self._feed.text):
            raise BrokenValue
        return self._feed.text[self.offset]

    def _more(self) -> Reading[None]:
        """Wait for more text, which a broken value never gets."""
        if self._feed.is_final:
            raise BrokenValue
        yield


def escaped(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return msgspec.json.encode(writable(text)).decode()[1:-1]
