"""JSON schemas as grammars enforce them: closed objects, no lookaround."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.text.grammar.bounded_values import LIMIT
from mlxstack.text.grammar.enforced_schema import circular_reference, enforced

NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = {**NAME, "additionalProperties": False}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
EMAIL = r"^(?!\.)(?!.*\.\.)([a-z.]+)@([a-z.]+)$"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAME, CLOSED),
        ({"type": "array", "items": NAME}, {"type": "array", "items": CLOSED}),
        (
            {"$defs": {"a": NAME}, "$ref": "#/$defs/a"},
            {"$defs": {"a": CLOSED}, "$ref": "#/$defs/a"},
        ),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [NAME]}, {"allOf": [CLOSED]}),
        ({**NAME, "$schema": "http://json-schema.org/schema#", "required": None}, CLOSED),
        (
            {"$defs": {"Größe[int]": NAME}, "$ref": "#/$defs/Größe[int]"},
            {"$defs": {"Größe[int]": CLOSED}, "$ref": "#/$defs/Gr%C3%B6%C3%9Fe%5Bint%5D"},
        ),
        ({"type": "object", "properties": [], "required": {}}, {**EMPTY, "required": []}),
        ({"type": "string", "nullable": True, "format": None}, {"type": ["string", "null"]}),
        ({"const": "a", "nullable": True}, {"enum": ["a", None]}),
        (
            {"$ref": "#/$defs/a", "nullable": True},
            {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        ),
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(schema: Any, expected: Any) -> None:
    assert enforced(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {**NAME, "additionalProperties": {"type": "string"}},
        {**NAME, "patternProperties": {"^x-": {"type": "string"}}},
        {"allOf": [NAME, {"properties": {"age": {"type": "string"}}, "type": "object"}]},
        {**NAME, "anyOf": [{"type": "object", "properties": {"age": {"type": "string"}}}]},
        {"enum": [NAME]},
    ],
)
def test_an_object_described_in_several_places_stays_open(schema: Any) -> None:
    assert enforced(schema) == schema


def test_a_value_of_any_type_has_one_definition() -> None:
    free = {"$ref": "#/$defs/x-value"}
    made = enforced({"properties": {"a": {}, "b": {"type": "array"}}, "required": ["c"]})
    assert made["properties"] == {"a": free, "b": {"type": "array", "items": free}, "c": free}
    assert {"type": "array", "items": free} in made["$defs"]["x-value"]["anyOf"]
    assert enforced({"type": "object"})["additionalProperties"] == free


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minimum": 0}, {"minimum": 0, "maximum": LIMIT}),
        ({"maximum": 1e21}, {"minimum": -LIMIT, "maximum": LIMIT}),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -LIMIT, "maximum": LIMIT}),
        ({"minimum": 2, "exclusiveMinimum": True}, {"exclusiveMinimum": 2, "maximum": LIMIT}),
        ({"maximum": 2, "exclusiveMaximum": False}, {"minimum": -LIMIT, "maximum": 2}),
        ({"exclusiveMinimum": 5e-324}, {"exclusiveMinimum": 0, "maximum": LIMIT}),
        ({"minimum": -1.8e308, "maximum": -1e-45}, {"minimum": -LIMIT, "exclusiveMaximum": 0}),
    ],
)
def test_numbers_have_two_bounds_that_can_be_enforced(schema: Any, expected: Any) -> None:
    made = enforced({"type": ["integer", "null"], **schema})
    assert made == {"type": ["integer", "null"], **expected}
    number = enforced({"type": ["number", "null"], **schema})
    assert number == {"type": ["number", "null"], **expected, "multipleOf": 1e-10}


def test_a_reference_to_itself_is_found() -> None:
    there = {"properties": {"a": {"$ref": "#/$defs/b"}}}
    assert circular_reference({**there, "$defs": {"b": {"$ref": "#/$defs/b"}}}) == "#/$defs/b"
    listed = {"type": "array", "items": {"$ref": "#/$defs/b"}}
    assert circular_reference({**there, "$defs": {"b": listed}}) is None


def test_properties_are_no_keywords() -> None:
    named = {"properties": {"allOf": {"type": "string"}, "pattern": NAME, "properties": NAME}}
    made = enforced(named)
    assert made["additionalProperties"] is False
    assert made["properties"]["pattern"] == made["properties"]["properties"] == CLOSED


@pytest.mark.parametrize(
    "pattern",
    [EMAIL, "(?<=a)b", "(?<!a)b", r"(a)\1", r"\bfoo\b", "(?P<a>b)(?P=a)", r"(?<a>b)\k<a>"],
)
def test_lookaround_is_left_out(pattern: str) -> None:
    assert enforced({"type": "string", "pattern": pattern}) == {"type": "string"}


def test_other_patterns_stay() -> None:
    for pattern in ("^(?:a|b)+$", "(?P<year>[0-9]{4})", r"\d\\1"):
        schema = {"type": "string", "pattern": pattern}
        assert enforced(schema) == schema


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["properties", "allOf", "items", "enum", "pattern", "$defs", "x"]),
                inner,
            )
        ),
    )
)
def test_any_json_is_rewritten_once(schema: Any) -> None:
    if isinstance(schema, dict):
        once = enforced(schema)
        assert enforced(once) == once
