"""Notations of values in tool calls: JSON, Python's literals, Gemma's."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from mlxstack.text.formats.argument_values import CONSTANTS_OF_JSON
from mlxstack.text.formats.checked_calls import plain
from mlxstack.text.formats.gemma_values import SCALAR, parse_scalar

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\"}


class BareText(Struct, frozen=True):
    """Patterns of the end of a text without quotes.

    It may end at `end`, where `after` matches: another argument, the call's end, or another
    call. More text decides where `begun` matches.
    """

    end: re.Pattern[str]
    after: re.Pattern[str]
    begun: re.Pattern[str]


class Notation(Struct, frozen=True):
    """Spelling of values.

    `escapes` are the letters after a backslash; without any, a backslash is text. `scalar` reads a
    value that matches `scalar_text`: neither quoted nor a container. It raises ValueError. With
    `is_raw_after_break`, a text has no escapes after a line break that no backslash stands before.
    """

    quotes: tuple[str, ...]
    scalar: Callable[[str], Any]
    escapes: Mapping[str, str] = {}
    scalar_text: re.Pattern[str] = re.compile(r"[^\s,:\[\]{}()\"'<]*")
    has_bare_keys: bool = False
    has_commas: bool = True
    is_raw_after_break: bool = False
    bare: BareText | None = None

    @property
    def has_certain_quotes(self) -> bool:
        """Whether no text holds a quote."""
        return len(self.quotes[0]) > 1


def _scalar(text: str) -> Any:
    """A number or constant of JSON or Python."""
    if text in CONSTANTS_OF_JSON:
        return CONSTANTS_OF_JSON[text]
    value = ast.literal_eval(text)
    if not isinstance(value, bool | int | float | None) or plain(value) != value:
        raise ValueError(f"{value!r} is no value of JSON")
    return value


def _gemma_scalar(text: str) -> Any:
    return plain(parse_scalar(text.strip()))


JSON = Notation(('"',), _scalar, {**_ESCAPES, "/": "/"})
PYTHON = Notation(
    ('"', "'"),
    _scalar,
    {**_ESCAPES, "a": "\a", "v": "\v", "\n": ""},
    is_raw_after_break=True,
    bare=BareText(
        re.compile(r"[,)]"),
        re.compile(
            r",\s*+(?P<key>[\w$-]++)\s*+=(?!=)"
            r"|(?:,\s*+)?\)\s*+(?:(?=[\]<]|\Z)|(?:,\s*+)?(?P<name>[\w.]++)\()"
        ),
        re.compile(r",\s*+(?:\w++\s*+)?=?\Z|(?:,\s*+)?\)\s*+(?:,\s*+)?[\w.]*+\Z"),
    ),
)
# A key right before its value counts without a declaration, but no address.
_GEMMA_BARE = BareText(
    re.compile(r"(?<!\s)\s*[,}]|[,}]"),
    re.compile(
        r"\s*+,\s*+\"?(?:[A-Za-z_]\w*+\"?:(?=[^\s/])|(?P<key>[\w.-]++)\"?\s*+:)"
        r"|\s*+(?:,\s*+)?\}\s*+(?:(?=<|\Z)|(?:[,;]\s*+)?call:(?P<name>[\w.-]++)\{)"
    ),
    re.compile(r"\s*+(?:,\s*+\"?+[\w.-]*+\"?+\s*+:?|(?:,\s*+)?\}\s*+(?:[,;]\s*+)?[\w.:-]*+)\Z"),
)


def gemma_notation(quote: str) -> Notation:
    """Gemma's notation, with this mark around text."""
    return Notation(
        (quote,), _gemma_scalar, {}, SCALAR, has_bare_keys=True, has_commas=False, bare=_GEMMA_BARE
    )
