"""Rules of JSON values whose objects have their members in any order.

The JSON grammar of llguidance has members in the order of the schema: an argument that stands
before one that a model has written could not be written any more. Objects are taken apart here,
down to the values whose schema has no order; llguidance compiles those. Objects that list their
properties have no others unless the schema says so.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.bounded_values import TYPES
from mlxstack.text.grammar.enforced_schema import NAMES, UNENFORCED, references, schemas_in
from mlxstack.text.grammar.lark_builder import MAX_COUNTED, LarkBuilder, MemberRule, quoted
from mlxstack.text.schema_types import Schema, named_types, normal, referred

COLON = "/: ?/"
COMMA = "/, ?/"
CHARACTER = r'(?:\\(?:["\\\/bfnrt]|u[0-9a-fA-F]{4})|[^"\\\x00-\x1F\x7F])'
"""Regular expression of one character of a JSON string."""
COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"}
)
ARRAY = frozenset({"type", "items", "minItems", "maxItems", "prefixItems", "additionalItems"})
VALUED = frozenset({"const", "enum", "$dynamicRef", "$recursiveRef"})
"""Keywords of objects without rules here."""
KNOWN = COMBINED | OBJECT | ARRAY | VALUED | {"patternProperties"}
"""Keywords of objects and lists; others, such as `x-order`, say nothing about their values."""
ANY_NAME = re.compile(r"\^?(?:\(\.\*\)|\.\*)\$?")
"""Expression that every name matches, as TypeBox has it for records."""
DESCRIBING = frozenset({"if", "dependentSchemas"})
"""Unenforced keywords that may describe other members of the same object."""
MAX_ALTERNATIVES = 16
MAX_PARTS = 10_000
"""Parts of schemas that one value may have, each counted as often as something refers to it."""


class ObjectShape(Struct, frozen=True):
    """Members of an object by name.

    `others` is the schema of further ones; None: there are none. `patterns` are schemas of further
    ones by expressions of their names. A name in `required` may be described nowhere.
    """

    members: dict[str, Any]
    required: frozenset[str] = frozenset()
    others: Any = None
    n_min: int = 0
    n_max: int | None = None
    patterns: dict[str, Any] = {}


class JsonRules:
    """Rules of values, whose schemas may refer to parts of `root`."""

    def __init__(self, builder: LarkBuilder, root: Schema) -> None:
        self._builder = builder
        self._root = root
        self._references: dict[str, str] = {}
        self._open: list[str] = []
        self._n_parts = 0

    def value(self, schema: Schema) -> str:
        """Rule of a schema's values. Raises BadRequest for an invalid schema."""
        whole = self._builder.json(schema, self._root)
        try:
            if self._has_names(schema):
                return whole
            return self._value(schema)
        except RecursionError as error:
            raise BadRequest(f"tools: the schema is too deep: {error}", "tools") from None

    def _has_names(self, schema: Schema) -> bool:
        """Whether references depend on names of schemas.

        That of the root changes no pointer.
        """
        targets = references(schema) | references(self._root)
        are_pointers = all(target == "#" or target.startswith("#/") for target in targets)
        return bool(targets) and any(
            not NAMES.isdisjoint(part)
            for part in schemas_in([schema, self._root])
            if not (are_pointers and (part is schema or part is self._root))
        )

    def _value(self, schema: Schema | Literal[True]) -> str:
        self._count()
        if schema is True:
            return self._plain({})
        parts = self._taken_apart(normal(schema)) if _has_order(schema) else ""
        return parts or self._plain(schema)

    def _count(self) -> None:
        """Count a part. Raises BadRequest for too many: alternatives of alternatives multiply."""
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise BadRequest(f"tools: a schema has more than {MAX_PARTS} parts", "tools")

    def _plain(self, schema: Schema) -> str:
        """Rule of a value that llguidance compiles, or refuses."""
        return self._builder.rule(self._builder.json(schema, self._root))

    def _taken_apart(self, schema: Schema) -> str:
        """Rule of a value from rules of its parts, or ""."""
        keys = schema.keys() & KNOWN
        self._builder.unenforced |= UNENFORCED & schema.keys()
        if keys == {"$ref"}:
            return self._reference(schema["$ref"])
        if keys in ({"anyOf"}, {"oneOf"}):
            return self._either(min(keys), schema[min(keys)])
        is_list = {"items", "prefixItems"} & keys and not keys & (OBJECT - {"type"})
        types = named_types(schema, ("array",) if is_list else ("object",))
        forms: list[str] = []
        others = []
        for name in types:
            rules = []
            if name == "object":
                rules = self._objects(schema)
            elif name == "array":
                rules = self._arrays(schema)
            forms += rules
            others += [] if rules else [name]
        if forms and others:
            forms.append(self._plain({**schema, "type": others}))
        return self._builder.either(forms)

    def _reference(self, target: Any) -> str:
        """Rule of the target of a reference, which may be recursive."""
        meant = referred(target, self._root) if isinstance(target, str) else None
        if meant is None:
            return ""
        if target not in self._references:
            self._references[target] = self._builder.reserve()
            self._builder.complete(self._references[target], self._value(meant))
        return self._references[target]

    def _either(self, keyword: str, parts: Any) -> str:
        if not isinstance(parts, list) or not all(isinstance(part, dict | bool) for part in parts):
            return ""
        self._report_inexact(keyword, parts)
        return self._builder.either(self._value(part) for part in parts if part is not False)

    def _report_inexact(self, keyword: str, parts: list[Any]) -> None:
        """Name `oneOf` unenforced where a value may be of several parts."""
        if keyword == "oneOf" and not are_exclusive(parts):
            self._builder.unenforced.add(keyword)

    def _arrays(self, schema: Schema) -> list[str]:
        """Rules of the lists of a schema."""
        n_min = schema.get("minItems", 0)
        n_max = schema.get("maxItems")
        are_counts = _is_count(n_min) and (n_max is None or (_is_count(n_max) and n_max >= n_min))
        if not are_counts or (COMBINED | VALUED) & schema.keys():
            return []
        first = schema.get("prefixItems", [])
        more = schema.get("items", {} if first else None)
        if isinstance(more, list):
            first, more = more, schema.get("additionalItems", {})
        are_schemas = isinstance(first, list) and all(
            isinstance(part, dict | bool) and part is not False for part in first
        )
        if not are_schemas or not isinstance(more, dict | bool) or not (first or more):
            return []
        if n_max == 0:
            return [self._builder.rule('"[" "]"')]
        if (more is False and n_min > len(first)) or (n_max is not None and n_max < len(first)):
            return []
        return [self._list(first, more, n_min, n_max)]

    def _list(self, first: list[Any], more: Any, n_min: int, n_max: int | None) -> str:
        """Rule of `first` items, then of `more`.

        The last ones may be missing.
        """
        comma = self._builder.rule(COMMA)
        following = ""
        if more is not False and n_max != len(first):
            # The first item of a list has no comma.
            n_before = len(first) or 1
            n_least = max(0, n_min - n_before)
            n_most = "" if n_max is None else n_max - n_before
            following = f"({comma} {self._value(more)}){{{n_least},{n_most}}}"
        items = [self._value(part) for part in first] or [self._value(more)]
        for index in reversed(range(1, len(items))):
            following = f"{comma} {items[index]} {following}"
            if index >= n_min:
                following = f"({following})?"
        inside = f"{items[0]} {following}"
        return self._builder.rule(f'"[" {inside} "]"' if n_min else f'"[" ({inside})? "]"')

    def _objects(self, schema: Schema) -> list[str]:
        """Rules of the objects of a schema."""
        shapes = self._shapes({**schema, "type": "object"})
        if not shapes or not all(map(_is_writable, shapes)):
            return []
        return [self._object(shape) for shape in shapes]

    def _object(self, shape: ObjectShape) -> str:
        colon = self._builder.rule(COLON)
        comma = self._builder.rule(COMMA)
        members = [
            MemberRule(self._member(name, schema), is_required=name in shape.required)
            for name, schema in shape.members.items()
        ]
        further = [
            f"{self._plain({'type': 'string', 'pattern': pattern})} {colon} {self._value(schema)}"
            for pattern, schema in shape.patterns.items()
        ]
        if shape.others is not None:
            key = self._builder.terminal(_other_names(shape.members))
            further.append(f"{key} {colon} {self._value(shape.others)}")
        others = self._builder.either(further)
        inside = self._builder.unordered(
            members, comma, others=others, n_min=shape.n_min, n_max=shape.n_max
        )
        return self._builder.rule(f'"{{" {inside} "}}"')

    def _member(self, name: str, schema: Any) -> str:
        colon = self._builder.rule(COLON)
        return self._builder.rule(f"{quoted(_json_text(name))} {colon} {self._value(schema)}")

    def _shapes(self, schema: Any) -> list[ObjectShape] | None:
        """Alternative shapes of an object; None for a schema without rules here."""
        self._count()
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            return None
        schema = normal(schema)
        self._builder.unenforced |= UNENFORCED & schema.keys()
        if not VALUED.isdisjoint(schema):
            return None
        shape = _own_shape(schema)
        groups = self._groups(schema, COMBINED & schema.keys())
        if shape is None or groups is None:
            return None
        shapes = [shape]
        for group in groups:
            shapes = [_joined(first, second) for first, second in itertools.product(shapes, group)]
            if not 0 < len(shapes) <= MAX_ALTERNATIVES:
                return None
        return shapes

    def _groups(self, schema: Schema, keywords: Iterable[str]) -> list[list[ObjectShape]] | None:
        """Groups of shapes that `keywords` add, one shape of each."""
        groups: list[list[ObjectShape]] = []
        for keyword in sorted(keywords):
            parts = [schema[keyword]] if keyword == "$ref" else schema[keyword]
            if not isinstance(parts, list):
                return None
            alternatives = []
            for part in parts:
                shapes = self._target_shapes(part) if keyword == "$ref" else self._shapes(part)
                if shapes is None:
                    return None
                alternatives.append(shapes)
            if keyword in ("anyOf", "oneOf"):
                self._report_inexact(keyword, parts)
                alternatives = [list(itertools.chain.from_iterable(alternatives))]
            groups += alternatives
        return groups

    def _target_shapes(self, target: Any) -> list[ObjectShape] | None:
        """Shapes of the target of a reference; None where it contains the reference itself."""
        if not isinstance(target, str) or target in self._open:
            return None
        self._open.append(target)
        shapes = self._shapes(referred(target, self._root))
        self._open.pop()
        return shapes


def are_exclusive(parts: Sequence[Any]) -> bool:
    """Whether no value is of two schemas, by types or constant members."""
    schemas = [part for part in parts if isinstance(part, dict)]
    if len(schemas) < len(parts) or not schemas:
        return len(parts) < 2
    constants = [_constants(part) for part in schemas]
    shared = set(constants[0]).intersection(*constants[1:])
    choices = [list(map(_types, schemas))]
    choices += [[values[name] for values in constants] for name in shared]
    return any(
        all(first.isdisjoint(second) for first, second in itertools.combinations(sets, 2))
        for sets in choices
    )


def _types(schema: Schema) -> frozenset[str]:
    """Types of the values of a schema; each integer is a number."""
    if "type" not in schema:
        return frozenset(TYPES)
    return frozenset("number" if name == "integer" else str(name) for name in named_types(schema))


def _constants(schema: Schema) -> dict[str, frozenset[str]]:
    """Values as JSON of the required members that have listed ones."""
    members = schema.get("properties")
    required = schema.get("required")
    if not isinstance(members, dict) or not isinstance(required, list):
        return {}
    listed = {
        name: [part["const"]] if "const" in part else part.get("enum")
        for name, part in members.items()
        if isinstance(part, dict) and name in required
    }
    return {
        name: frozenset(map(json.dumps, values))
        for name, values in listed.items()
        if isinstance(values, list)
    }


def _has_order(schema: Schema) -> bool:
    """Whether it has members of objects, or references."""
    return any(
        "$ref" in part or (isinstance(members := part.get("properties"), dict) and members)
        for part in schemas_in(schema)
    )


def _is_writable(shape: ObjectShape) -> bool:
    """Whether this module has rules for the shape."""
    is_bounded = shape.n_min > 0 or shape.n_max is not None
    further = [*shape.patterns.values(), *([] if shape.others is None else [shape.others])]
    if is_bounded and (further or len(shape.members) > MAX_COUNTED):
        return False
    if not shape.members:
        return any(isinstance(part, dict) and _has_order(part) for part in further)
    n_max = len(shape.members) if shape.n_max is None else shape.n_max
    return len(shape.required) <= n_max and shape.n_min <= len(shape.members)


def _own_shape(schema: Schema) -> ObjectShape | None:
    """Shape that the keywords of an object itself describe."""
    members = schema.get("properties", {})
    required = schema.get("required", [])
    others = schema.get("additionalProperties", {} if DESCRIBING & schema.keys() else None)
    n_min = schema.get("minProperties", 0)
    n_max = schema.get("maxProperties")
    patterns = schema.get("patternProperties", {})
    is_valid = (
        isinstance(members, dict)
        and all(isinstance(part, dict | bool) for part in members.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
        and (others is None or isinstance(others, dict | bool))
        and _is_count(n_min)
        and (n_max is None or _is_count(n_max))
        and isinstance(patterns, dict)
        and all(isinstance(part, dict) for part in patterns.values())
    )
    if not is_valid or any(members.get(name) is False for name in required):
        return None
    allowed = {name: part for name, part in members.items() if part is not False}
    described = {**allowed, **{name: {} for name in required if name not in allowed}}
    if others is False:
        others = None
    elif others is True:
        others = {}
    if len(patterns) == 1 and not described and ANY_NAME.fullmatch(*patterns):
        (others,) = patterns.values()
        patterns = {}
    elif patterns and (schema.get("additionalProperties") is not False or described):
        return None
    return ObjectShape(described, frozenset(required), others, n_min, n_max, patterns)


def _joined(first: ObjectShape, second: ObjectShape) -> ObjectShape:
    """Shape of an object that has both."""
    members = {**first.members}
    for name, schema in second.members.items():
        other = members.get(name, {})
        if other in ({}, True) or other == schema:
            members[name] = schema
        elif schema not in ({}, True):
            members[name] = {"allOf": [other, schema]}
    limits = [limit for limit in (first.n_max, second.n_max) if limit is not None]
    return ObjectShape(
        members,
        first.required | second.required,
        first.others if first.others is not None else second.others,
        max(first.n_min, second.n_min),
        min(limits, default=None),
        {**first.patterns, **second.patterns},
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _other_names(names: Iterable[str]) -> str:
    """Terminal of a JSON string that is none of these."""
    excluded = " | ".join(quoted(_json_text(name)) for name in names)
    anything = f'/"{CHARACTER}*"/'
    if excluded:
        return f"{anything} & ~({excluded})"
    return anything
