"""Grammars of pythonic tool calls and of the two Gemma syntaxes."""

import keyword
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import (
    SCALARS,
    LarkBuilder,
    MemberRule,
    containing,
    members,
    quoted,
)
from mlxstack.text.schema_types import Schema, SchemaTypes, named_types, properties, schema_types

PYTHON_WORDS = (("boolean", '"True"'), ("boolean", '"False"'), ("null", '"None"'))
QUOTE = '<|"|>'
ESCAPE = "<escape>"
COMMA = quoted(",")
COMMA_SPACE = f'{COMMA} " "?'
MAX_DEPTH = 12
FREE_VALUE = "free_value"


class SchemaPosition(Struct, frozen=True):
    """A schema somewhere in the parameters `root`."""

    schema: Any
    root: Schema
    depth: int = 0

    def below(self, schema: Any) -> "SchemaPosition":
        """A part of it."""
        return SchemaPosition(schema, self.root, self.depth + 1)

    @property
    def kinds(self) -> SchemaTypes:
        """Rule of the value."""
        return schema_types(self.schema, self.root)


class LiteralSyntax(Struct, frozen=True):
    """Literal syntax of values; `means` stands between key and value.

    `value` gives no rule for what it cannot write.
    """

    means: str
    is_key: Callable[[str], bool]
    value: Callable[[SchemaPosition, LarkBuilder], str]


def python_call(tool: Tool, builder: LarkBuilder) -> str | None:
    """`name(key=value, ...)`, whose values are JSON."""
    if not all(_is_python_name(part) for part in tool.name.split(".")):
        return None
    known = _members(SchemaPosition(tool.parameters, tool.parameters), PYTHON, builder)
    if known is None:
        return None
    return f'{quoted(tool.name + "(")} {builder.unordered(known, COMMA_SPACE)} ")"'


def gemma_call(tool: Tool, builder: LarkBuilder) -> str | None:
    """Gemma call `call:name{key:value,...}` with its string marks, nested."""
    if re.fullmatch(r"[\w-]+", tool.name):
        return _gemma_call(tool, builder, GEMMA)
    return None


def function_gemma_call(tool: Tool, builder: LarkBuilder) -> str | None:
    """FunctionGemma call; values are text, numbers, booleans and null."""
    if _is_word(tool.name):
        return _gemma_call(tool, builder, FUNCTION_GEMMA)
    return None


def _gemma_call(tool: Tool, builder: LarkBuilder, syntax: LiteralSyntax) -> str | None:
    known = _members(SchemaPosition(tool.parameters, tool.parameters), syntax, builder)
    if known is None:
        return None
    return f'{quoted(f"call:{tool.name}{{")} {builder.unordered(known, COMMA)} "}}"'


def _members(
    at: SchemaPosition, syntax: LiteralSyntax, builder: LarkBuilder
) -> list[MemberRule] | None:
    """Members and whether required; None if a required one is inexpressible."""

    def rule(key: str, schema: Any) -> str:
        value = syntax.value(at.below(schema), builder) if syntax.is_key(key) else ""
        if value:
            return builder.rule(f"{quoted(key + syntax.means)} {value}")
        return ""

    return members(properties(at.schema), rule)


def _json(at: SchemaPosition, builder: LarkBuilder) -> str:
    """JSON, or the constants of Python."""
    plain = (schema for schema in at.kinds.others if "enum" not in schema)
    types = {one for schema in plain for one in named_types(schema)}
    literals = [word for kind, word in PYTHON_WORDS if kind in types]
    value = JsonRules(builder, at.root).value(at.schema if isinstance(at.schema, dict) else {})
    return builder.rule(" | ".join([value, *literals]))


def _flat(at: SchemaPosition, builder: LarkBuilder) -> str:
    texts = _texts(at, ("}", ESCAPE), ESCAPE, builder)
    return builder.either([*texts, *(builder.scalar(one, at.root) for one in at.kinds.others)])


def _deep(at: SchemaPosition, builder: LarkBuilder) -> str:
    if at.depth > MAX_DEPTH:
        return ""
    rules = _texts(at, (QUOTE, "\x00"), QUOTE, builder)
    for schema in at.kinds.others:
        rules.append(builder.scalar(schema, at.root))
        named = schema.get("type")
        if named == "object" and not schema.get("properties") and "enum" not in schema:
            is_closed = schema.get("additionalProperties") is False
            rules.append('"{" "}"' if is_closed else _free_object(builder))
        elif isinstance(named, list) and "object" in named:
            rules += [_free_object(builder), _free_array(builder)]
        elif named == "object":
            known = _members(at.below(schema), GEMMA, builder)
            rules += [] if known is None else [f'"{{" {builder.unordered(known, COMMA)} "}}"']
        elif named == "array":
            rules += _array(at.below(schema), builder)
    return builder.either(rules)


def _free_object(builder: LarkBuilder) -> str:
    """An object of any values."""
    pair = f'/\\w+/ ":" {_free_value(builder)}'
    return f'"{{" ({pair} ({COMMA} {pair})*)? "}}"'


def _free_array(builder: LarkBuilder) -> str:
    value = _free_value(builder)
    return f'"[" ({value} ({COMMA} {value})*)? "]"'


def _free_value(builder: LarkBuilder) -> str:
    """Any value, recursively through one rule."""
    if builder.define(FREE_VALUE):
        never = [containing(one) for one in (QUOTE, "\x00")]
        text = builder.text({"type": "string"}, never, QUOTE)
        scalar = builder.json({"type": sorted(SCALARS)}, {})
        forms = f"{_free_object(builder)} | {_free_array(builder)}"
        builder.complete(FREE_VALUE, f"{builder.literal(QUOTE)} {text} | {scalar} | {forms}")
    return FREE_VALUE


def _array(at: SchemaPosition, builder: LarkBuilder) -> list[str]:
    item = _deep(at.below(at.schema.get("items", {})), builder)
    least = at.schema.get("minItems", 0)
    most = at.schema.get("maxItems")
    if not item or most == 0:
        return [] if least else ['"[" "]"']
    upper = "" if most is None else most - 1
    some = f'"[" {item} ({COMMA} {item}){{{max(0, least - 1)},{upper}}} "]"'
    return [some] if least else ['"[" "]"', some]


def _texts(
    at: SchemaPosition, never: tuple[str, ...], quote: str, builder: LarkBuilder
) -> list[str]:
    """Text between quotes."""
    avoided = [containing(one) for one in never]
    rules = [builder.text(schema, avoided, quote) for schema in at.kinds.texts]
    return [f"{builder.literal(quote)} {rule}" for rule in rules if rule]


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _is_word(name: str) -> bool:
    return re.fullmatch(r"\w+", name) is not None


PYTHON = LiteralSyntax("=", _is_python_name, _json)
GEMMA = LiteralSyntax(":", _is_word, _deep)
FUNCTION_GEMMA = LiteralSyntax(":", _is_word, _flat)
