"""JSON schemas as grammars enforce them: closed objects, no lookaround."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.text.grammar.enforced_schema import enforced

NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = {**NAME, "additionalProperties": False}
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
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(schema: Any, expected: Any) -> None:
    assert enforced(schema, is_lenient=False) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAME, "additionalProperties": True},
        {**NAME, "additionalProperties": {"type": "integer"}},
        {**NAME, "patternProperties": {"^x-": {}}},
        {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
        {**NAME, "anyOf": [{"properties": {"age": {"type": "integer"}}}]},
        {"enum": [NAME]},
        {"default": NAME},
    ],
)
def test_what_may_have_other_properties_stays_as_it_is(schema: Any) -> None:
    assert enforced(schema, is_lenient=False) == schema


def test_properties_are_no_keywords() -> None:
    named = {"properties": {"allOf": {"type": "string"}, "pattern": NAME, "properties": NAME}}
    made = enforced(named, is_lenient=True)
    assert made["additionalProperties"] is False
    assert made["properties"]["pattern"] == made["properties"]["properties"] == CLOSED


@pytest.mark.parametrize("pattern", [EMAIL, "(?<=a)b", "(?<!a)b", r"(a)\1"])
def test_lookaround_is_left_out_where_nothing_else_helps(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert enforced(schema, is_lenient=False) == schema
    assert enforced(schema, is_lenient=True) == {"type": "string"}


def test_other_patterns_stay() -> None:
    for pattern in ("^(?:a|b)+$", "(?P<year>[0-9]{4})", r"\d\\1"):
        schema = {"type": "string", "pattern": pattern}
        assert enforced(schema, is_lenient=True) == schema


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
        once = enforced(schema, is_lenient=True)
        assert enforced(once, is_lenient=True) == once
