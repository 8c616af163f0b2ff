"""Values of tool-call arguments, typed by the JSON schema."""

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlxstack.core.conversation import Tool
from mlxstack.text.schema_types import ANYTHING, OTHERS, SchemaTypes, argument_types, named_types

UNDECODABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
NULLS = ("null", "None")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
CONSTANTS = ("true", "false", "null", "none", "nan", "infinity")
CONSTANTS_OF_JSON = {"true": True, "false": False, "null": None}
METHOD = ".call"
"""Method of a tool in the calls of Llama's own tools."""

_NAME_SPACE = re.compile(r"[.:]")
"""End of a name space before a name, such as `functions.` or `default_api.`."""

QUOTES = (
    ('"', '"'),
    ("'", "'"),
    ("`", "`"),
    ('\\"', '\\"'),
    ("\u201c", "\u201d"),
    ("\u2018", "\u2019"),
)
"""Signs around a text that is quoted."""

CDATA_OPENS = "<![CDATA["
CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
ANY = ANYTHING
TEXT = SchemaTypes(({"type": "string"},))


class ArgumentTypes:
    """The types of the arguments of all offered tools."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._known: dict[str, Mapping[str, SchemaTypes]] = {}

    def has(self, name: str) -> bool:
        """Whether a tool of this name is offered."""
        return self.name(name) in self._tools

    def name(self, name: str) -> str:
        """Name of the tool, without foreign name spaces."""
        if name in self._tools:
            return name
        plain = name.removesuffix(METHOD)
        starts = (0, *(sign.end() for sign in _NAME_SPACE.finditer(plain)))
        offered = (plain[start:] for start in starts if plain[start:] in self._tools)
        return next(offered, name)

    def declares(self, name: str, key: str) -> bool:
        """Whether a tool has a property of this name."""
        return name in self._tools and key in self._arguments(name)

    def names(self, name: str) -> list[str]:
        """Arguments of a tool in order; none of an unknown one."""
        if name in self._tools:
            return [*self._arguments(name)]
        return []

    def of(self, name: str, key: str) -> SchemaTypes:
        """Types of an argument; undeclared ones are text."""
        if name not in self._tools:
            return ANY
        types = self._arguments(name)
        return types.get(key, TEXT if types else ANY)

    def _arguments(self, name: str) -> Mapping[str, SchemaTypes]:
        """Types of the arguments of an offered tool, computed once."""
        if name not in self._known:
            self._known[name] = argument_types(dict(self._tools[name]))
        return self._known[name]

    def root(self, name: str) -> dict[str, Any]:
        """The parameters of a tool."""
        return dict(self._tools.get(name, {}))


def argument_value(text: str, types: SchemaTypes) -> Any:
    """Bare argument by its types; text keeps its white space."""
    wrapped = CDATA.fullmatch(text)
    if wrapped:
        return wrapped[1]
    bare = text.strip()
    if types.is_text:
        if types.others and text in NULLS:
            return None
        return _listed(text, types)
    kinds = type_names(types)
    if kinds == {"boolean"} and not types.texts and bare.casefold() in BOOLEANS:
        return BOOLEANS[bare.casefold()]
    value = decoded(bare, text)
    if isinstance(value, str) and not types.texts:
        # A number or constant in quotes, or a number with zeros before it.
        inner = decoded(value.strip().lstrip("0"), value)
        if _fits(inner, kinds):
            value = inner
    if isinstance(value, float) and kinds <= {"integer", "number"}:
        return _number(value)
    is_text = types.texts and not _fits(value, kinds)
    return _listed(text, types) if is_text else value


def _listed(text: str, types: SchemaTypes) -> str:
    """Text without quotes that its enum does not have."""
    texts = {text for schema in types.texts for text in schema.get("enum", ())}
    bare = text.strip()
    if bare in texts:
        return text
    for opening, closing in QUOTES:
        inner = bare.removeprefix(opening).removesuffix(closing)
        if inner in texts and f"{opening}{inner}{closing}" == bare:
            return inner
    return text


def is_surely_text(begun: str, types: SchemaTypes) -> bool:
    """Whether `argument_value` reads any value that begins so as its text."""
    bare = begun.lstrip()
    if not bare or bare.startswith(CDATA_OPENS) or CDATA_OPENS.startswith(bare):
        return False
    is_quoted = any(bare[0] == opening[0] for opening, _ in QUOTES)
    if is_quoted and any("enum" in schema or "const" in schema for schema in types.texts):
        return False
    if types.is_text:
        return not types.others or not any(null.startswith(begun.rstrip()) for null in NULLS)
    word = bare.rstrip().casefold()
    is_word = any(constant.startswith(word) for constant in CONSTANTS)
    return bool(types.texts) and not is_word and bare[0] not in "{[+-.0123456789"


def decoded(bare: str, text: str) -> Any:
    """The value that JSON or else Python reads; `text` if neither does."""
    try:
        return object_of(bare)
    except UNDECODABLE:
        return text


def object_of(text: str) -> Any:
    """A JSON value, or else a Python literal; raises ValueError."""
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    except ValueError:
        try:
            return ast.literal_eval(_JsonConstants().visit(ast.parse(text, mode="eval").body))
        except UNDECODABLE as error:
            raise ValueError(str(error)) from error


class _JsonConstants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in CONSTANTS_OF_JSON:
            return ast.Constant(CONSTANTS_OF_JSON[node.id])
        return node

    def visit_Set(self, node: ast.Set) -> Any:
        return self.visit(ast.List(node.elts, ast.Load()))  # In the order as written.


def type_names(types: SchemaTypes) -> set[str]:
    """Names of the types that are no text."""
    return {name for schema in types.others for name in named_types(schema, OTHERS)}


def _fits(value: Any, kinds: set[str]) -> bool:
    """Whether a value has one of the types."""
    names = {
        bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",),
        list: ("array",), type(None): ("null",),
    }.get(type(value), ())  # fmt: skip
    return not kinds.isdisjoint(names)


def _number(value: float) -> float | int:
    """Raises ValueError for what no JSON number is."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    return int(value) if value.is_integer() else value
