"""Notations of values in tool calls: JSON, Python's literals, Gemma's."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from mlxstack.features.formats.argument_values import (
    BOOLEANS,
    CONSTANTS_OF_JSON,
    NULLS,
    ArgumentTypes,
    decoded,
    type_names,
)
from mlxstack.features.formats.checked_calls import plain
from mlxstack.features.formats.syntax import PythonBody
from mlxstack.text.schema_types import SchemaTypes

CONTAINERS = frozenset({"object", "array"})
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\"}


class BareText(Struct, frozen=True):
    """Patterns of the end of a text without quotes."""

    end: re.Pattern[str]
    """Where the text may end."""

    after: re.Pattern[str]
    """Text after its end: another argument, the call's end, or another call."""

    begun: re.Pattern[str]
    """Beginnings of `after`, which more text decides."""


class Notation(Struct, frozen=True):
    """Spelling of values."""

    quotes: tuple[str, ...]
    scalar: Callable[[str], Any]
    """Reads a value that is neither quoted nor a container. Raises ValueError."""

    escapes: Mapping[str, str] = {}
    """Letters after a backslash; without any, a backslash is text."""

    scalar_text: re.Pattern[str] = re.compile(r"[^\s,:\[\]{}()\"'<]*")
    bare_key: re.Pattern[str] = re.compile(r"\w*")
    """A key without quotes."""

    containers: str = "{["
    """First characters of objects and lists."""

    has_commas: bool = True
    has_marks: bool = False
    """Marks are the quotes, which no text holds."""

    has_bare_quotes: bool = False
    """Text may hold its own quote; it has no escapes from there on, or after a line break."""

    bare: BareText | None = None


class TypedArguments:
    """Types of the arguments of a called tool."""

    def __init__(self, types: ArgumentTypes, name: str) -> None:
        self._types = types
        self._name = types.name(name)
        self.offers = types.has

    def types_of(self, key: str) -> SchemaTypes:
        """Types of an argument."""
        return self._types.of(self._name, key)

    def declares(self, key: str) -> bool:
        """Whether the tool has an argument of this name."""
        return self._types.declares(self._name, key)

    def positional(self, index: int) -> str:
        """Name of an argument by its place; "" beyond the last."""
        return next(iter(self._types.names(self._name)[index : index + 1]), "")

    def is_bare(self, key: str, sign: str) -> bool:
        """Whether a value that begins so, without quotes, is text."""
        raise NotImplementedError

    def is_spelled(self, key: str) -> bool:
        """Whether quotes hold a value of another type."""
        del key
        return False

    def is_set(self, key: str) -> bool:
        """Whether braces hold a list."""
        del key
        return False


class GemmaArguments(TypedArguments):
    """Arguments of a call of Gemma."""

    def is_bare(self, key: str, sign: str) -> bool:
        return sign not in "<{[\"'" and self.declares(key) and bool(self.types_of(key).texts)


class PythonArguments(TypedArguments):
    """Arguments of a Python call."""

    def __init__(self, types: ArgumentTypes, name: str, body: PythonBody) -> None:
        super().__init__(types, name)
        self._body = body

    def is_bare(self, key: str, sign: str) -> bool:
        del sign
        return self._body.has_bare_text and self.types_of(key).is_text

    def is_spelled(self, key: str) -> bool:
        types = self.types_of(key)
        return not types.texts or (self._body.has_quoted_values and bool(types.others))

    def is_set(self, key: str) -> bool:
        return type_names(self.types_of(key)) & CONTAINERS == {"array"}


def _scalar(text: str) -> Any:
    """A number or constant of JSON or Python."""
    if text in CONSTANTS_OF_JSON:
        return CONSTANTS_OF_JSON[text]
    value = ast.literal_eval(text)
    if not isinstance(value, bool | int | float | None) or plain(value) != value:
        raise ValueError(f"{value!r} is no value of JSON")
    return value


def _gemma_scalar(written: str) -> Any:
    """Null, a boolean, a number, else text. Raises ValueError for none."""
    text = written.strip()
    if not text:
        raise ValueError("a value is missing")
    if text in NULLS:
        return None
    if text.casefold() in ("true", "false"):
        return BOOLEANS[text.casefold()]
    if text[:1] == "'" == text[-1:]:
        return text[1:-1]
    if text[:1] in '"+-0123456789':
        return plain(decoded(text, text.removeprefix('"')))
    return text


JSON = Notation(('"', "'"), _scalar, {**_ESCAPES, "/": "/"})
PYTHON = Notation(
    ('"""', "'''", '"', "'"),
    _scalar,
    {**_ESCAPES, "a": "\a", "v": "\v", "\n": ""},
    containers="{[(",
    has_bare_quotes=True,
    bare=BareText(
        re.compile(r"[,)]"),
        re.compile(
            r",\s*+(?P<key>[\w$-]++)\s*+=(?!=)"
            r"|(?:,\s*+)?\)\s*+(?:(?=[\]<]|\Z)|(?:,\s*+)?(?P<name>[\w.]++)\()"
        ),
        re.compile(r",\s*+(?:\w++\s*+)?=?\Z|(?:,\s*+)?\)\s*+(?:,\s*+)?[\w.]*+\Z"),
    ),
)
# A value without marks; quotes of other notations stand around some.
_GEMMA_SCALAR = re.compile(r"(?s)([\"'])(?:(?!\1)[^\\]|\\.)*(?:\1|\\?\Z)|[^,:{}\[\]]*")
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
        (quote,),
        _gemma_scalar,
        scalar_text=_GEMMA_SCALAR,
        bare_key=re.compile(r"[^:,<{}\[\]]*"),
        has_commas=False,
        has_marks=True,
        bare=_GEMMA_BARE,
    )
