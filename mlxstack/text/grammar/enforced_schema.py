"""JSON schema as a grammar enforces it.

Objects that list their `properties` have no others unless the schema says so, as in the converters
of llama.cpp (its grammars/README.md) and xgrammar: a model could fill an open object without end.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from mlxstack.text.grammar.schema_types import Schema
from mlxstack.text.grammar_check import VALUES

NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by name."""
SPREADING = frozenset(
    {"$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf", "unevaluatedProperties"}
)
"""Keywords beside `properties` that may describe other properties of the same object."""
OPEN = frozenset({"additionalProperties", "patternProperties"})
LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")
"""Lookaround and backreferences, which llguidance's regular expressions do not have."""


def enforced(schema: Schema, *, is_lenient: bool) -> Schema:
    """Close objects; with `is_lenient` leave out patterns with lookaround.

    A schema that describes one object in several places keeps its objects open.
    """
    if not any(map(_is_spread, _schemas(schema))):
        schema = _changed(schema, _closed)
    return _changed(schema, _without_lookaround) if is_lenient else schema


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
    is_open = "properties" not in schema or not OPEN.isdisjoint(schema)
    return schema if is_open else {**schema, "additionalProperties": False}


def _without_lookaround(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not LOOKAROUND.search(pattern):
        return schema
    return {key: value for key, value in schema.items() if key != "pattern"}
