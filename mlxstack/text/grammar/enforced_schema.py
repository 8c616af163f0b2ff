"""JSON schema as a grammar enforces it.

Objects that list their `properties` have no others unless the schema says so, as in the converters
of llama.cpp (its grammars/README.md) and xgrammar: a model could fill an open object without end.
"""

import re
from collections.abc import Iterator
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
"""What llguidance's regular expressions lack, as does any that is matched in linear time."""


def enforced(schema: Schema, *, is_lenient: bool) -> Schema:
    """Close objects; with `is_lenient` leave out patterns with lookaround.

    A schema that describes one object in several places keeps its objects open.
    """
    is_spread = any(map(_is_spread, _schemas(schema)))
    rewritten: Schema = _rewritten(schema, is_lenient, may_close=not is_spread)
    return rewritten


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


def _is_spread(schema: Schema) -> bool:
    parts = schema.get("allOf")
    is_joined = isinstance(parts, list) and len(parts) > 1
    return is_joined or ("properties" in schema and not SPREADING.isdisjoint(schema))


def _rewritten(schema: Any, is_lenient: bool, *, may_close: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(one, is_lenient, may_close=may_close) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            made[key] = {
                name: _rewritten(one, is_lenient, may_close=may_close)
                for name, one in value.items()
            }
        elif key in VALUES:
            made[key] = value
        else:
            made[key] = _rewritten(value, is_lenient, may_close=may_close)
    if may_close and "properties" in made and OPEN.isdisjoint(made):
        made["additionalProperties"] = False
    pattern = made.get("pattern")
    if is_lenient and isinstance(pattern, str) and LOOKAROUND.search(pattern):
        del made["pattern"]
    return made
