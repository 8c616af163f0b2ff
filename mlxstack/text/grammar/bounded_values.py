"""Bounds of the digits of numbers, in free values too.

A greedy model writes zeros up to `max_tokens` where a grammar permits it. llama.cpp bounds the
digits of its JSON grammars as well (its common/json-schema-to-grammar.cpp).
"""

from collections.abc import Mapping
from typing import Any

from mlxstack.text.schema_types import Schema, named_types

LIMIT = 9 * 10**18
"""Largest number: 64 bit integers fit, and the ranges that llguidance can express."""
SMALLEST = 1e-10
"""Unit of decimal places; as `multipleOf` it costs llguidance nothing."""
DEFINITIONS = "$defs"
VALUE = "x-value"
NUMBER = "x-number"
INTEGER = "x-integer"
NUMERIC = frozenset({"number", "integer"})
TYPES = frozenset({"string", "boolean", "null", "object", "array", *NUMERIC})
ELSEWHERE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "enum", "const", "not"})
"""Keywords with which a schema without `type` is described elsewhere."""
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = frozenset({*LOWER, *UPPER, "multipleOf"})


def reference(name: str) -> Schema:
    """Reference to a shared definition."""
    return {"$ref": f"#/{DEFINITIONS}/{name}"}


def bounded(schema: Schema) -> Schema:
    """Bound the numbers that this schema describes itself."""
    types = _types(schema)
    is_typed = "type" in schema or not BOUNDS.isdisjoint(schema)
    if not is_typed or NUMERIC.isdisjoint(types) or "enum" in schema or "const" in schema:
        return schema
    bounds = _bounds(schema)
    if "number" not in types or "multipleOf" in bounds:
        return bounds
    return {**bounds, "multipleOf": SMALLEST}


def shared(schema: Schema) -> Schema:
    """Refer to one definition of plain numbers and free values."""
    match schema:
        case {"type": "number"} if len(schema) == 1:
            return reference(NUMBER)
        case {"type": "integer"} if len(schema) == 1:
            return reference(INTEGER)
        case {} if not schema:
            return reference(VALUE)
    types = _types(schema)
    free: Schema = {}
    if "object" in types and schema.get("additionalProperties", "properties" not in schema) is True:
        free["additionalProperties"] = reference(VALUE)
    if "array" in types and schema.get("items", "prefixItems" not in schema) is True:
        free["items"] = reference(VALUE)
    return {**schema, **free}


def definitions() -> Schema:
    """The definitions that `shared` refers to."""
    value = reference(VALUE)
    return {
        NUMBER: bounded({"type": "number"}),
        INTEGER: bounded({"type": "integer"}),
        VALUE: {
            "anyOf": [
                {"type": ["string", "boolean", "null"]},
                reference(NUMBER),
                {"type": "array", "items": value},
                {"type": "object", "additionalProperties": value},
            ]
        },
    }


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema describes itself."""
    if "type" not in schema:
        if ELSEWHERE.isdisjoint(schema):
            return TYPES
        return frozenset()
    return frozenset(map(str, named_types(schema)))


def _bounds(schema: Schema) -> Schema:
    """Schema with both bounds within the limit, exclusive ones as numbers."""
    bounds = dict(schema)
    for plain, exclusive in (LOWER, UPPER):
        # A boolean of draft 4 says whether the plain bound is exclusive.
        if isinstance(bounds.get(exclusive), bool):
            is_exclusive = bounds.pop(exclusive)
            if is_exclusive and plain in bounds:
                bounds[exclusive] = bounds.pop(plain)
        for key in (plain, exclusive):
            if _is_number(bounds.get(key)):
                _fit(bounds, key)
        if plain not in bounds and exclusive not in bounds:
            bounds[plain] = -LIMIT if plain == "minimum" else LIMIT
    return bounds


def _fit(schema: Schema, key: str) -> None:
    """Drop a bound beyond the limit; round a tiny one."""
    bound = schema[key]
    if abs(bound) > LIMIT:
        del schema[key]
    elif 0 < abs(bound) < SMALLEST:
        del schema[key]
        is_inside = (bound > 0) == (key in LOWER)
        plain, exclusive = LOWER if key in LOWER else UPPER
        schema[exclusive if is_inside else plain] = 0


def _is_number(bound: Any) -> bool:
    return isinstance(bound, int | float) and not isinstance(bound, bool)
