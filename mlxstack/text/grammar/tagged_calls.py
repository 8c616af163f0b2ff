"""Grammar of tool calls with tagged arguments: strings verbatim, others as JSON."""

import json
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.text.formats.description import KEY, TYPE, TaggedBody
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import (
    ANYTHING,
    LarkBuilder,
    MemberRule,
    containing,
    members,
)
from mlxstack.text.schema_types import Schema, SchemaTypes, named_types, properties, schema_types

FREE = "free_tags"
NOTHING = '""'
NAMES = r"[^\s<>\"'{}\[\](),=&]+"
"""Names of tools and arguments."""
NO_ARGUMENTS: Schema = dict.fromkeys(("properties", "required", "allOf", "anyOf", "oneOf", "$ref"))
ANY = schema_types({}, {})
NULL = ("null|None",)
CONSTANTS = tuple(
    (word, value) for value in (None, True, False) for word in (json.dumps(value), str(value))
)
# What json.loads or ast.literal_eval could take for something else than text.
NO_TEXT = (
    r"(?i:null|none|true|false|nan|infinity)\s*",
    rf"[^A-Za-z]{ANYTHING}",
    rf"[A-Za-z]{{1,2}}['\"]{ANYTHING}",
    rf"set\({ANYTHING}",
)


class TagFormat(Struct, frozen=True):
    """Tags of a `body`, around each argument of its calls.

    Text never contains one of `never`, because the parser would take it for a mark.
    """

    body: TaggedBody
    never: tuple[str, ...]

    @property
    def argument(self) -> str:
        """Text before a value, with the slots of key and type."""
        return f"{self.body.argument_opens}{KEY}{self.body.value_opens}"


def tagged(tags: TagFormat) -> Callable[[Tool, LarkBuilder], str | None]:
    """The writer of such calls."""

    def call(tool: Tool, builder: LarkBuilder) -> str | None:
        items = _arguments(tags, tool.parameters, builder)
        if items is None or not re.fullmatch(NAMES, tool.name):
            return None
        opens = builder.call_opening("".join(tags.body.parts), tool.name)
        return f"{opens} {builder.unordered(items, NOTHING)}"

    return call


def _arguments(
    tags: TagFormat, parameters: Schema, builder: LarkBuilder
) -> list[MemberRule] | None:
    """Arguments and whether required; None if a required one is inexpressible."""

    def rule(key: str, schema: Any) -> str:
        if not re.fullmatch(NAMES, key):
            return ""
        return builder.either(_named(tags, key, schema, parameters, builder))

    return members(properties(parameters), rule)


def _named(tags: TagFormat, key: str, schema: Any, root: Schema, builder: LarkBuilder) -> list[str]:
    """The forms of an argument of this name."""
    body = tags.body
    closes = body.value_closes.replace(KEY, key)
    names = dict(body.types)
    forms = []
    for kind, rule in _values(tags, schema_types(schema, root), root, closes, builder):
        opens = tags.argument.replace(KEY, key).replace(TYPE, names.get(kind, kind))
        forms.append(f"{builder.literal(opens)} {rule}")
    return forms


def _values(
    tags: TagFormat, types: SchemaTypes, root: Schema, closes: str, builder: LarkBuilder
) -> list[tuple[str, str]]:
    """Type and rule of an argument's values, up to its end."""
    values = []
    ending = builder.literal(closes)
    item = tags.body.item
    if item and types == ANY:
        return [("object", f"{_free_value(tags, builder)} {ending}")]
    for schema in types.texts:
        if tags.body.has_json_text:
            rule = builder.json({**schema, "type": "string"}, root)
            values.append(("string", f"{rule} {ending}"))
        elif rule := builder.text(schema, _avoided(tags, types), closes, _literals(tags, types)):
            values.append(("string", rule))
    if item and types.texts:
        return values
    for schema in types.others:
        if item:
            nested = _nested(tags, schema, root, builder)
            values += [("object", f"{one} {ending}") for one in nested]
            continue
        named = schema.get("type")
        kind = named if isinstance(named, str) else "object"
        values.append((kind, f"{JsonRules(builder, root).value(schema)} {ending}"))
        if kind == "boolean" and "enum" not in schema:
            # As templates print them that know no JSON.
            values.append((kind, f'("True" | "False") {ending}'))
    return values


def _nested(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> list[str]:
    """Rules of a value without text; containers are nested tags."""
    types = named_types(schema)
    rules = [builder.scalar(schema, root)]
    if "object" in types:
        rules.append(_nested_object(tags, schema, root, builder))
    if "array" in types:
        rules.append(_nested_list(tags, schema, root, builder))
    return [one for one in rules if one]


def _nested_object(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> str:
    if not schema.get("properties"):
        return f"({_free_member(tags, builder)})*"
    items = _arguments(tags, {**root, **NO_ARGUMENTS, **schema}, builder)
    if items is None:
        return ""
    return builder.unordered(items, NOTHING)


def _nested_list(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> str:
    items = schema.get("items", {})
    if not items or items is True:
        item = _free_member(tags, builder, tags.body.item)
    else:
        item = builder.either(_named(tags, tags.body.item, items, root, builder)) or '""'
    least = schema.get("minItems", 0)
    most = schema.get("maxItems", "")
    if least or most != "":
        return f"({item}){{{least},{most}}}"
    return f"({item})*"


def _free_member(tags: TagFormat, builder: LarkBuilder, key: str = "") -> str:
    """A nested argument of any type, of this name or of any."""
    opens, _, middle = tags.argument.partition(KEY)
    closes, _, last = tags.body.value_closes.partition(KEY)
    name = builder.literal(key) if key else "/[\\w.-]+/"
    closing = f"{builder.literal(closes)} {name if last else ''} {builder.literal(last)}"
    return (
        f"{builder.literal(opens)} {name} {builder.literal(middle)} "
        f"{_free_value(tags, builder)} {closing}"
    )


def _free_value(tags: TagFormat, builder: LarkBuilder) -> str:
    """Text or nested arguments, recursively through one rule."""
    if builder.define(FREE):
        text = builder.free_text(tags.body.argument_opens.strip())
        item = _free_member(tags, builder, tags.body.item)
        member = _free_member(tags, builder)
        builder.complete(FREE, f"{text} | ({item})+ | ({member})+")
    return FREE


def _literals(tags: TagFormat, kinds: SchemaTypes) -> list[str]:
    """Words for null and booleans, where the argument allows them."""
    if tags.body.types:
        return []
    values = [value for schema in kinds.others for value in schema.get("enum", ())]
    plain = (schema for schema in kinds.others if "enum" not in schema)
    types = {one for schema in plain for one in named_types(schema)}
    return [
        word
        for word, value in CONSTANTS
        if ("null" if value is None else "boolean") in types or any(one is value for one in values)
    ]


def _avoided(tags: TagFormat, types: SchemaTypes) -> tuple[str, ...]:
    """Texts that the parser would read as another type."""
    avoided = tuple(containing(one) for one in tags.never)
    if tags.body.types or not types.others:
        return avoided
    return (*avoided, *(NULL if types.is_text else NO_TEXT))
