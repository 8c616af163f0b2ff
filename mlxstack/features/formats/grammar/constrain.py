"""Grammar of a tool call, written from the nodes of its syntax.

Text between tags is verbatim, and other values are JSON, or literals of Python or Gemma.
"""

import json
import keyword
import re
from typing import Any

from mlxstack.core.conversation import Tool
from mlxstack.features.formats.syntax import (
    ARGUMENTS,
    KEY,
    NAME,
    TYPE,
    CallSyntax,
    GemmaBody,
    JsonBody,
    NamedBody,
    PythonBody,
    TaggedBody,
    first_mark,
    pieces,
)
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import (
    ANYTHING,
    SCALARS,
    LarkBuilder,
    MemberRule,
    containing,
    members,
    quoted,
)
from mlxstack.text.schema_types import ANYTHING as ANY_TYPE
from mlxstack.text.schema_types import Schema, SchemaTypes, named_types, properties, schema_types

NOTHING = '""'
COMMA = quoted(",")
COMMA_SPACE = f'{COMMA} " "?'
NAMES = r"[^\s<>\"'{}\[\](),=&]+"
"""Names of tools and arguments."""
FREE_TAGS = "free_tags"
FREE_VALUE = "free_value"
MAX_NESTED = 5
"""Containers around a value of Gemma."""
NO_ARGUMENTS: Schema = dict.fromkeys(("properties", "required", "allOf", "anyOf", "oneOf", "$ref"))
NULL = ("null|None",)
CONSTANTS = tuple(
    (word, value) for value in (None, True, False) for word in (json.dumps(value), str(value))
)
PYTHON_CONSTANTS = (("boolean", '"True"'), ("boolean", '"False"'), ("null", '"None"'))
# What json.loads or ast.literal_eval could take for something else than text.
NO_TEXT = (
    r"(?i:null|none|true|false|nan|infinity)\s*",
    rf"[^A-Za-z]{ANYTHING}",
    rf"[A-Za-z]{{1,2}}['\"]{ANYTHING}",
    rf"set\({ANYTHING}",
)


def call_rule(syntax: CallSyntax, tool: Tool, builder: LarkBuilder) -> str | None:
    """Rule of a call of this tool; None for an inexpressible one."""
    match syntax.body:
        case JsonBody(parts=parts):
            return _with_json(parts, json.dumps(tool.name)[1:-1], tool, builder)
        case NamedBody(parts=parts) if re.fullmatch(NAMES, tool.name):
            return _with_json((*parts, ARGUMENTS), tool.name, tool, builder)
        case TaggedBody() as body:
            return TagRules(syntax, body, tool, builder).call()
        case PythonBody() as body:
            return PythonRules(body, tool, builder).call()
        case GemmaBody() as body:
            return GemmaRules(body, tool, builder).call()
    return None


def _with_json(parts: tuple[str, ...], name: str, tool: Tool, builder: LarkBuilder) -> str | None:
    """Literal parts around a name and arguments in JSON."""
    if not name:
        return None
    schema = {**tool.parameters, "type": "object", "nullable": False}
    arguments = JsonRules(builder, schema).value(schema)
    return " ".join(
        arguments if part == ARGUMENTS else builder.call_opening(part, name) for part in parts
    )


class ArgumentRules:
    """Rules of the arguments of one tool, in any order."""

    def __init__(self, tool: Tool, builder: LarkBuilder) -> None:
        self.tool = tool
        self.builder = builder
        self.root = tool.parameters

    def members(self, schema: Schema, n_outer: int = 0) -> list[MemberRule] | None:
        """Members of an object; None if a required one has no rule."""
        return members(properties(schema), lambda key, part: self.member(key, part, n_outer))

    def member(self, key: str, schema: Any, n_outer: int) -> str:
        """Rule of a key and its value inside `n_outer` containers, or ""."""
        raise NotImplementedError

    def types(self, schema: Any) -> SchemaTypes:
        """Types of a value."""
        return schema_types(schema, self.root)


class TagRules(ArgumentRules):
    """Rules of arguments between tags.

    Text never contains what the parser would take for a mark.
    """

    def __init__(
        self, syntax: CallSyntax, body: TaggedBody, tool: Tool, builder: LarkBuilder
    ) -> None:
        super().__init__(tool, builder)
        self._body = body
        self._opens = f"{body.argument_opens}{KEY}{body.value_opens}"
        marks = (body.value_closes, *(pieces(literal)[-1] for literal in syntax.closings))
        never = (*(first_mark(mark.partition(KEY)[0]) for mark in marks), "<![CDATA[")
        self._avoided = tuple(containing(mark) for mark in never)

    def call(self) -> str | None:
        """The head of a call, and its arguments."""
        arguments = self.members(self.root)
        if arguments is None or not re.fullmatch(NAMES, self.tool.name):
            return None
        opens = self.builder.call_opening("".join(self._body.parts), self.tool.name)
        return f"{opens} {self.builder.unordered(arguments, NOTHING)}"

    def member(self, key: str, schema: Any, n_outer: int = 0) -> str:
        if not re.fullmatch(NAMES, key):
            return ""
        closes = self._body.value_closes.replace(KEY, key)
        names = dict(self._body.types)
        forms = []
        for kind, rule in self._values(self.types(schema), closes):
            opens = self._opens.replace(KEY, key).replace(TYPE, names.get(kind, kind))
            forms.append(f"{self.builder.literal(opens)} {rule}")
        return self.builder.either(forms)

    def _values(self, types: SchemaTypes, closes: str) -> list[tuple[str, str]]:
        """Type and rule of an argument's values, up to its end."""
        values = []
        ending = self.builder.literal(closes)
        has_tags = bool(self._body.item)
        if has_tags and types == ANY_TYPE:
            return [("object", f"{self._free_value()} {ending}")]
        for schema in types.texts:
            if self._body.has_json_text:
                rule = self.builder.json({**schema, "type": "string"}, self.root)
                values.append(("string", f"{rule} {ending}"))
            elif rule := self._text(schema, types, closes):
                values.append(("string", rule))
        if has_tags and types.texts:
            return values
        for schema in types.others:
            if has_tags:
                values += [("object", f"{rule} {ending}") for rule in self._nested(schema)]
                continue
            named = schema.get("type")
            kind = "object"
            if isinstance(named, str):
                kind = named
            values.append((kind, f"{JsonRules(self.builder, self.root).value(schema)} {ending}"))
            if kind == "boolean" and "enum" not in schema:
                # As templates print them that know no JSON.
                values.append((kind, f'("True" | "False") {ending}'))
        return values

    def _text(self, schema: Schema, types: SchemaTypes, closes: str) -> str:
        """Text that is read as such, or a constant."""
        if self._body.types:
            return self.builder.text(schema, self._avoided, closes)
        avoided = self._avoided
        if types.others:
            avoided += NULL if types.is_text else NO_TEXT
        listed = [value for part in types.others for value in part.get("enum", ())]
        plain = (part for part in types.others if "enum" not in part)
        names = {name for part in plain for name in named_types(part)}
        spellings = [
            word
            for word, constant in CONSTANTS
            if ("null" if constant is None else "boolean") in names
            or any(value is constant for value in listed)
        ]
        return self.builder.text(schema, avoided, closes, spellings)

    def _nested(self, schema: Schema) -> list[str]:
        """Rules of a value without text; containers are nested tags."""
        types = named_types(schema)
        rules = [self.builder.scalar(schema, self.root)]
        if "object" in types:
            rules.append(self._nested_object(schema))
        if "array" in types:
            rules.append(self._nested_list(schema))
        return [rule for rule in rules if rule]

    def _nested_object(self, schema: Schema) -> str:
        if not schema.get("properties"):
            return f"({self._free_member()})*"
        members_of = self.members({**self.root, **NO_ARGUMENTS, **schema})
        if members_of is None:
            return ""
        return self.builder.unordered(members_of, NOTHING)

    def _nested_list(self, schema: Schema) -> str:
        items = schema.get("items", {})
        if not items or items is True:
            item = self._free_member(self._body.item)
        else:
            item = self.member(self._body.item, items) or NOTHING
        n_min = schema.get("minItems", 0)
        n_max = schema.get("maxItems", "")
        if n_min or n_max != "":
            return f"({item}){{{n_min},{n_max}}}"
        return f"({item})*"

    def _free_member(self, key: str = "") -> str:
        """A nested argument of any type, of this name or of any."""
        literal = self.builder.literal
        opens, _, middle = self._opens.partition(KEY)
        closes, _, last = self._body.value_closes.partition(KEY)
        name = "/[\\w.-]+/"
        if key:
            name = literal(key)
        closing = f"{literal(closes)} {name if last else ''} {literal(last)}"
        return f"{literal(opens)} {name} {literal(middle)} {self._free_value()} {closing}"

    def _free_value(self) -> str:
        """Text or nested arguments, recursively through one rule."""
        if self.builder.define(FREE_TAGS):
            text = self.builder.free_text(self._body.argument_opens.strip())
            item = self._free_member(self._body.item)
            member = self._free_member()
            self.builder.complete(FREE_TAGS, f"{text} | ({item})+ | ({member})+")
        return FREE_TAGS


class PythonRules(ArgumentRules):
    """Rules of `name(key=value, ...)`, whose values are JSON."""

    def __init__(self, body: PythonBody, tool: Tool, builder: LarkBuilder) -> None:
        super().__init__(tool, builder)
        self._opens = "".join(body.parts)

    def call(self) -> str | None:
        """A call; None if its names are none of Python."""
        names = self.tool.name.split(".")
        arguments = self.members(self.root) if all(map(_is_python_name, names)) else None
        if arguments is None:
            return None
        opens = self.builder.literal(self._opens.replace(NAME, self.tool.name))
        return f'{opens} {self.builder.unordered(arguments, COMMA_SPACE)} ")"'

    def member(self, key: str, schema: Any, n_outer: int) -> str:
        del n_outer
        if not _is_python_name(key):
            return ""
        plain = (part for part in self.types(schema).others if "enum" not in part)
        types = {name for part in plain for name in named_types(part)}
        described = schema if isinstance(schema, dict) else {}
        value = JsonRules(self.builder, self.root).value(described)
        constants = [word for kind, word in PYTHON_CONSTANTS if kind in types]
        values = self.builder.rule(" | ".join([value, *constants]))
        return self.builder.rule(f"{quoted(f'{key}=')} {values}")


class GemmaRules(ArgumentRules):
    """Rules of `call:name{key:value,...}` with marks around text."""

    def __init__(self, body: GemmaBody, tool: Tool, builder: LarkBuilder) -> None:
        super().__init__(tool, builder)
        self._body = body
        never = ("}", body.quote) if body.is_flat else (body.quote, "\x00")
        self._avoided = [containing(text) for text in never]

    def call(self) -> str | None:
        """A call; None if its names are no words."""
        names = r"[\w-]+"
        if self._body.is_flat:
            names = r"\w+"
        arguments = self.members(self.root) if re.fullmatch(names, self.tool.name) else None
        if arguments is None:
            return None
        opens = self.builder.literal("".join(self._body.parts).replace(NAME, self.tool.name))
        return f'{opens} {self.builder.unordered(arguments, COMMA)} "}}"'

    def member(self, key: str, schema: Any, n_outer: int) -> str:
        value = ""
        if re.fullmatch(r"\w+", key):
            value = self._value(schema, n_outer)
        if value:
            return self.builder.rule(f"{quoted(f'{key}:')} {value}")
        return ""

    def _value(self, schema: Any, n_outer: int) -> str:
        if n_outer > MAX_NESTED:
            return ""
        types = self.types(schema)
        rules = [self._text(part) for part in types.texts]
        for part in types.others:
            rules.append(self.builder.scalar(part, self.root))
            if not self._body.is_flat:
                rules += self._containers(part, n_outer)
        return self.builder.either(rules)

    def _text(self, schema: Schema) -> str:
        text = self.builder.text(schema, self._avoided, self._body.quote)
        if text:
            return f"{self.builder.literal(self._body.quote)} {text}"
        return ""

    def _containers(self, schema: Schema, n_outer: int) -> list[str]:
        """Rules of the objects and lists of a schema."""
        named = schema.get("type")
        if named == "object" and not schema.get("properties") and "enum" not in schema:
            is_closed = schema.get("additionalProperties") is False
            return ['"{" "}"' if is_closed else self._free_object()]
        if isinstance(named, list) and "object" in named:
            return [self._free_object(), self._free_list()]
        if named == "object":
            inside = self._object(schema, n_outer + 1)
            if inside:
                return [inside]
            return []
        if named == "array":
            return self._list(schema, n_outer)
        return []

    def _object(self, schema: Schema, n_outer: int) -> str:
        """Rule of an object; "" if a required member has none."""
        inside = self.members(schema, n_outer)
        if inside is None:
            return ""
        return f'"{{" {self.builder.unordered(inside, COMMA)} "}}"'

    def _list(self, schema: Schema, n_outer: int) -> list[str]:
        item = self._value(schema.get("items", {}), n_outer + 1)
        n_min = schema.get("minItems", 0)
        n_max = schema.get("maxItems")
        if not item or n_max == 0:
            if n_min:
                return []
            return ['"[" "]"']
        n_more = "" if n_max is None else n_max - 1
        some = f'"[" {item} ({COMMA} {item}){{{max(0, n_min - 1)},{n_more}}} "]"'
        if n_min:
            return [some]
        return ['"[" "]"', some]

    def _free_object(self) -> str:
        pair = f'/\\w+/ ":" {self._free_value()}'
        return f'"{{" ({pair} ({COMMA} {pair})*)? "}}"'

    def _free_list(self) -> str:
        value = self._free_value()
        return f'"[" ({value} ({COMMA} {value})*)? "]"'

    def _free_value(self) -> str:
        """Any value, recursively through one rule."""
        if self.builder.define(FREE_VALUE):
            text = self._text({"type": "string"})
            scalar = self.builder.json({"type": sorted(SCALARS)}, {})
            forms = f"{self._free_object()} | {self._free_list()}"
            self.builder.complete(FREE_VALUE, f"{text} | {scalar} | {forms}")
        return FREE_VALUE


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
