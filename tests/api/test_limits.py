"""Schemas, grammars and patterns of strangers are bounded: refused, or followed in little time."""

import json

import pytest

from tests.fuzz.doors import house

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def status(**more: object) -> int:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, **more}).encode()
    return house().post(CHAT, body, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa").status_code


def test_a_grammar_has_a_largest_size() -> None:
    assert status(grammar='root ::= "' + "a" * 1_000_001 + '"') == 400
    schema = {"type": "object", "description": "a" * 1_000_001}
    assert status(json_schema=schema) == 400


@pytest.mark.parametrize(
    "pattern",
    ["^(a+)+$", "^(a|aa)+$", "^((a{0,500}){0,500}){0,500}$", "(?=a)b", "[", "a{1,999999999}"],
)
def test_a_pattern_of_a_stranger_hangs_nobody(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    assert status(json_schema=schema) in {200, 400}
    assert status(stop=[pattern]) == 200


def test_a_schema_that_points_at_itself_hangs_nobody() -> None:
    knot = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    wide = {
        "type": "object",
        "properties": {f"p{n}": {"enum": list(range(50))} for n in range(999)},
    }
    for schema in (knot, tree, wide):
        assert status(json_schema=schema) in {200, 400}
