"""JSON schema as a grammar enforces it.

Objects that list their `properties` have no others unless the schema says so, as in the converters
of llama.cpp (its grammars/README.md) and xgrammar: a model could fill an open object without end.
Numbers have a bounded number of digits. Patterns with lookaround are left out.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from mlxstack.text.grammar.bounded_values import (
    DEFINITIONS,
    INTEGER,
    NUMBER,
    VALUE,
    bounded,
    definitions,
    reference,
    shared,
)
from mlxstack.text.grammar.grammar_check import VALUES
from mlxstack.text.schema_types import Schema, normal, referred

NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by name."""
SPREADING = frozenset(
    {"$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf", "unevaluatedProperties"}
)
"""Keywords beside `properties` that may describe other properties of the same object."""
OPEN = frozenset({"additionalProperties", "patternProperties"})
UNENFORCED = frozenset(
    {
        "contains", "contentSchema", "dependentRequired", "dependentSchemas", "else", "if",
        "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
"""Keywords of JSON Schema 2020-12 that llguidance leaves out."""
LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\(\?P=|\(\?[>#(]|\\[1-9]|\\k<|\\[bB<>])")
"""Expressions that llguidance does not have.

Lookaround, backreferences, boundaries of words, atomic groups, comments and conditions.
"""
DRAFT = re.compile(r"json-schema\.org/draft(?:-0[4-7]|/2019-09|/2020-12)/")
"""Versions of JSON Schema that llguidance knows."""
SAFE = "!#$%&'()*+,/:;=?@~"
"""Characters of a reference that are no letters and need no escape."""


ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title"}
)
ROOT = "x-root"
"""Name of the definition that holds a whole schema."""
NAMES = frozenset({"$anchor", "$dynamicAnchor", "$id", "id"})
"""Keywords that change the meaning of a reference to `#`."""


def enforced(schema: Schema) -> Schema:
    """Close objects, bound numbers, leave out annotations and lookaround.

    A schema that describes one object in several places keeps its objects open.
    """
    schema = dict(_changed(schema, _plain))
    is_spread = any(map(_is_spread, schemas_in(schema)))
    if not is_spread:
        schema = _changed(schema, _closed)
    if is_spread or any(not NAMES.isdisjoint(part) for part in schemas_in(schema)):
        return dict(_changed(schema, bounded))
    return _defined(_changed(schema, lambda part: bounded(shared(part))))


def _defined(schema: Schema) -> Schema:
    """The schema with the definitions that it refers to."""
    own = schema.get(DEFINITIONS, {})
    ours = [reference(name) for name in (VALUE, NUMBER, INTEGER)]
    if not any(part in ours for part in schemas_in(schema)) or not isinstance(own, dict):
        return schema
    return {**schema, DEFINITIONS: {**own, **definitions()}}


def without_grammar(schema: Any) -> set[str]:
    """Keywords of a schema that are left out before llguidance reads it."""
    are_odd = (_has_lookaround(part.get("pattern")) for part in schemas_in(schema))
    if any(are_odd):
        return {"pattern"}
    return set()


def circular_reference(root: Schema) -> str | None:
    """Reference that leads back to itself through other references alone."""
    for schema in schemas_in(root):
        seen: list[str] = []
        target: Schema | None = schema
        while target is not None and isinstance(name := target.get("$ref"), str):
            if name in seen:
                return name
            seen.append(name)
            target = referred(name, root)
    return None


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Schema with the parts of `root` that it may refer to."""
    targets = references(schema)
    if not targets:
        return schema
    inherited: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    targets |= references(inherited)
    if all(target.startswith(("#/$defs/", "#/definitions/")) for target in targets):
        return {**inherited, **schema}

    def moved(part: Schema) -> Schema:
        target = part.get("$ref")
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            return part
        return {**part, "$ref": f"#/{DEFINITIONS}/{ROOT}{target.removeprefix('#')}"}

    return {**_changed(schema, moved), DEFINITIONS: {ROOT: _changed(root, moved)}}


def references(schema: Schema) -> set[str]:
    """Targets of all references in a schema."""
    targets = (part.get("$ref") for part in schemas_in([schema]))
    return {target for target in targets if isinstance(target, str)}


def schemas_in(schema: Any) -> Iterator[Schema]:
    """The schema and all in it."""
    if isinstance(schema, list):
        for part in schema:
            yield from schemas_in(part)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                yield from schemas_in(list(value.values()))
            elif key not in VALUES:
                yield from schemas_in(value)


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """The schema with a change of itself and of all in it."""
    if isinstance(schema, list):
        return [_changed(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            changed[key] = {name: _changed(part, change) for name, part in value.items()}
        else:
            changed[key] = value if key in VALUES else _changed(value, change)
    return change(changed)


def _is_spread(schema: Schema) -> bool:
    parts = schema.get("allOf")
    is_joined = isinstance(parts, list) and len(parts) > 1
    return is_joined or ("properties" in schema and not SPREADING.isdisjoint(schema))


def _closed(schema: Schema) -> Schema:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not OPEN.isdisjoint(schema):
        return schema
    required = schema.get("required")
    names = []
    if isinstance(required, list):
        names = [name for name in required if isinstance(name, str)]
    # A required property may be described nowhere.
    whole = {**properties, **{name: {} for name in names if name not in properties}}
    return {**schema, "properties": whole, "additionalProperties": False}


def _plain(schema: Schema) -> Schema:
    """The schema without annotations, and without a pattern that has lookaround."""
    left_out = ANNOTATIONS
    if _has_lookaround(schema.get("pattern")):
        left_out = left_out | {"pattern"}
    if not DRAFT.search(str(schema.get("$schema", ""))):
        left_out = left_out | {"$schema"}
    plain = normal({key: _whole(value) for key, value in schema.items() if key not in left_out})
    if isinstance(target := plain.get("$ref"), str):
        plain["$ref"] = quote(target, safe=SAFE)
    return plain


def _has_lookaround(pattern: Any) -> bool:
    return isinstance(pattern, str) and LOOKAROUND.search(pattern) is not None


def _whole(value: Any) -> Any:
    """A float without decimals as an integer, which lengths have to be."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
