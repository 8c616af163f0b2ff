"""Grammar of tool calls with tagged arguments: strings verbatim, others as JSON."""

import json
import re
from collections.abc import Callable

from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.text.grammar.lark_builder import ANYTHING, LarkBuilder, containing, listed
from mlxstack.text.schema_types import Schema, SchemaTypes, named_types, properties, schema_types

FREE = "free_tags"
SCALARS = ("number", "integer", "boolean", "null")
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
    """Tags around a call and around each argument.

    `{name}`, `{index}`, `{key}` and `{type}` are filled in; names and keys match `names`. Text
    never contains one of `never`, and never matches one of `avoided`, because the parser would
    take it for something else. `types` are the words of `{type}` by JSON type, which also tell text
    from everything else; `has_json_text` writes text as JSON. With `item` objects are nested
    arguments, and lists are nested arguments of this name.
    """

    opens: str
    argument: str
    argument_closes: str
    closes: str
    never: tuple[str, ...]
    avoided: tuple[str, ...] = ()
    names: str = r"[^\s<>\"&']+"
    types: tuple[tuple[str, str], ...] = ()
    has_json_text: bool = False
    item: str = ""


def tagged(tags: TagFormat) -> Callable[[Tool, LarkBuilder], str | None]:
    """The writer of such calls."""

    def call(tool: Tool, builder: LarkBuilder) -> str | None:
        items = _arguments(tags, tool.parameters, builder)
        if items is None or not re.fullmatch(tags.names, tool.name):
            return None
        opens = builder.call_opening(tags.opens, tool.name)
        closes = builder.literal(tags.closes)
        return f"{opens} {listed(items, '')} {closes}"

    return call


def _arguments(
    tags: TagFormat, parameters: Schema, builder: LarkBuilder
) -> list[tuple[str, bool]] | None:
    """Arguments and whether required; None if a required one is inexpressible."""
    items = []
    for key, (schema, is_required) in properties(parameters).items():
        types = schema_types(schema, parameters)
        closes = tags.argument_closes.replace("{key}", key)
        is_known = re.fullmatch(tags.names, key) is not None
        values = _values(tags, types, parameters, closes, builder) if is_known else []
        forms = [_argument(tags, key, value, builder) for value in values]
        if forms:
            items.append((builder.rule(" | ".join(forms)), is_required))
        elif is_required:
            return None
    return items


def _argument(tags: TagFormat, key: str, value: tuple[str, str], builder: LarkBuilder) -> str:
    kind = dict(tags.types).get(value[0], value[0])
    opens = tags.argument.replace("{key}", key).replace("{type}", kind)
    return f"{builder.literal(opens)} {value[1]}"


def _values(
    tags: TagFormat, types: SchemaTypes, root: Schema, closes: str, builder: LarkBuilder
) -> list[tuple[str, str]]:
    """Type and rule of an argument's values, up to its end."""
    values, ending = [], builder.literal(closes)
    if tags.item and types == ANY:
        return [("object", f"{_free_value(tags, builder)} {ending}")]
    for schema in types.texts:
        if tags.has_json_text:
            rule = builder.json({**schema, "type": "string"}, root)
            values.append(("string", f"{rule} {ending}"))
        elif rule := builder.text(schema, _avoided(tags, types), closes, _words(tags, types)):
            values.append(("string", rule))
    if tags.item and types.texts:
        return values
    for schema in types.others:
        if tags.item:
            values += [
                ("object", f"{one} {ending}") for one in _nested(tags, schema, root, builder)
            ]
            continue
        named = schema.get("type")
        kind = named if isinstance(named, str) else "object"
        values.append((kind, f"{builder.json(schema, root)} {ending}"))
        if kind == "boolean" and "enum" not in schema:
            # As templates print them that know no JSON.
            values.append((kind, f'("True" | "False") {ending}'))
    return values


def _nested(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> list[str]:
    """Rules of a value without text; containers are nested tags."""
    types = named_types(schema)
    plain = [one for one in schema.get("enum", ()) if not isinstance(one, dict | list)]
    scalars = [one for one in types if one in SCALARS]
    rules = []
    if plain or ("enum" not in schema and scalars):
        scalar = {"enum": plain} if plain else {**schema, "type": scalars}
        rules.append(builder.json(scalar, root))
    if "enum" in schema:
        return rules
    if "object" in types:
        rules.append(_nested_object(tags, schema, root, builder))
    if "array" in types:
        rules.append(_nested_list(tags, schema, root, builder))
    return [one for one in rules if one]


def _nested_object(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> str:
    if not schema.get("properties"):
        return f"({_free_member(tags, builder)})*"
    items = _arguments(tags, {**root, **NO_ARGUMENTS, **schema}, builder)
    return "" if items is None else listed(items, "")


def _nested_list(tags: TagFormat, schema: Schema, root: Schema, builder: LarkBuilder) -> str:
    items = schema.get("items", {})
    if not items or items is True:
        item = _free_member(tags, builder, tags.item)
    else:
        closes = tags.argument_closes.replace("{key}", tags.item)
        values = _values(tags, schema_types(items, root), root, closes, builder)
        item = builder.rule(" | ".join(_argument(tags, tags.item, one, builder) for one in values))
    least, most = schema.get("minItems", 0), schema.get("maxItems", "")
    return f"({item}){{{least},{most}}}" if least or most != "" else f"({item})*"


def _free_member(tags: TagFormat, builder: LarkBuilder, key: str = "") -> str:
    """A nested argument of any type, of this name or of any."""
    opens, _, middle = tags.argument.partition("{key}")
    closes, _, last = tags.argument_closes.partition("{key}")
    name = builder.literal(key) if key else "/[\\w.-]+/"
    closing = f"{builder.literal(closes)} {name if last else ''} {builder.literal(last)}"
    return (
        f"{builder.literal(opens)} {name} {builder.literal(middle)} "
        f"{_free_value(tags, builder)} {closing}"
    )


def _free_value(tags: TagFormat, builder: LarkBuilder) -> str:
    """Text or nested arguments, recursively through one rule."""
    if builder.define(FREE):
        mark = tags.argument.partition("{key}")[0].strip()
        text = builder.free_text(mark)
        item, member = _free_member(tags, builder, tags.item), _free_member(tags, builder)
        builder.complete(FREE, f"{text} | ({item})+ | ({member})+")
    return FREE


def _words(tags: TagFormat, kinds: SchemaTypes) -> list[str]:
    """Words for null and booleans, where the argument allows them."""
    if tags.types:
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
    avoided = (*tags.avoided, *(containing(one) for one in tags.never))
    if tags.types or not types.others:
        return avoided
    return (*avoided, *(NULL if types.is_text else NO_TEXT))
