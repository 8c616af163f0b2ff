"""JSON schema as a grammar enforces it.

Objects that list their `properties` have no others unless the schema says so, as in the converters
of llama.cpp (its grammars/README.md) and xgrammar: a model could fill an open object without end.
Numbers have a bounded number of digits. Patterns with lookaround are left out.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

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
from mlxstack.text.schema_types import Schema, referred

NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by name."""
SPREADING = frozenset(
    {"$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf", "unevaluatedProperties"}
)
"""Keywords beside `properties` that may describe other properties of the same object."""
OPEN = frozenset({"additionalProperties", "patternProperties"})
LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")
"""Lookaround and backreferences, which llguidance's regular expressions do not have."""


ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title"}
)
NAMES = frozenset({"$anchor", "$dynamicAnchor", "$id", "id"})
"""Keywords that change the meaning of a reference to `#`."""


def enforced(schema: Schema) -> Schema:
    """Close objects, bound numbers, leave out annotations and lookaround.

    A schema that describes one object in several places keeps its objects open.
    """
    schema = dict(_changed(schema, _plain))
    is_spread = any(map(_is_spread, _schemas(schema)))
    if not is_spread:
        schema = _changed(schema, _closed)
    if is_spread or any(not NAMES.isdisjoint(one) for one in _schemas(schema)):
        return dict(_changed(schema, bounded))
    return _defined(_changed(schema, lambda one: bounded(shared(one))))


def _defined(schema: Schema) -> Schema:
    """The schema with the definitions that it refers to."""
    known = schema.get(DEFINITIONS, {})
    ours = [reference(name) for name in (VALUE, NUMBER, INTEGER)]
    if not any(one in ours for one in _schemas(schema)) or not isinstance(known, dict):
        return schema
    return {**schema, DEFINITIONS: {**known, **definitions()}}


def circular_reference(root: Schema) -> str | None:
    """Reference that leads back to itself through other references alone."""
    for schema in _schemas(root):
        seen: list[str] = []
        at: Schema | None = schema
        while at is not None and isinstance(name := at.get("$ref"), str):
            if name in seen:
                return name
            seen.append(name)
            at = referred(name, root)
    return None


def _schemas(schema: Any) -> Iterator[Schema]:
    """The schema and all in it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schemas(one)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                yield from _schemas(list(value.values()))
            elif key not in VALUES:
                yield from _schemas(value)


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """The schema with a change of itself and of all in it."""
    if isinstance(schema, list):
        return [_changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            made[key] = {name: _changed(one, change) for name, one in value.items()}
        else:
            made[key] = value if key in VALUES else _changed(value, change)
    return change(made)


def _is_spread(schema: Schema) -> bool:
    parts = schema.get("allOf")
    is_joined = isinstance(parts, list) and len(parts) > 1
    return is_joined or ("properties" in schema and not SPREADING.isdisjoint(schema))


def _closed(schema: Schema) -> Schema:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not OPEN.isdisjoint(schema):
        return schema
    required = schema.get("required")
    names = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
    # A required property may be described nowhere.
    whole = {**properties, **{name: {} for name in names if name not in properties}}
    return {**schema, "properties": whole, "additionalProperties": False}


def _plain(schema: Schema) -> Schema:
    """The schema without annotations, and without a pattern that has lookaround."""
    pattern = schema.get("pattern")
    is_odd = isinstance(pattern, str) and LOOKAROUND.search(pattern) is not None
    left_out = ANNOTATIONS | {"pattern"} if is_odd else ANNOTATIONS
    return {key: _whole(value) for key, value in schema.items() if key not in left_out}


def _whole(value: Any) -> Any:
    """A float without decimals as an integer, which lengths have to be."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
