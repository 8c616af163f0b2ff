"""Arguments of a call in any order, at every depth of a schema."""

from itertools import combinations, permutations
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import LarkBuilder
from tests.features.formats.call_walks import EVERY, walker_of

BYTES = LLTokenizer("byte")
A = '"a": 1'
B = '"b": 2'
C = '"c": 3'
NUMBER = {"type": "integer", "maximum": 9}
AB: dict[str, Any] = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
ABC = {**AB, "properties": {"a": NUMBER, "b": NUMBER, "c": NUMBER}}
TREE = {
    "type": "object",
    "properties": {"a": NUMBER, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["children"],
}
SHARED = {"a": NUMBER, "kind": {"type": "string"}}


def rules_of(schema: dict[str, Any]) -> LLMatcher:
    builder = LarkBuilder({})
    grammar = builder.grammar(JsonRules(builder, schema).value(schema))
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def is_value(rules: LLMatcher, text: str) -> bool:
    """Whether the grammar has this text as a whole."""
    state = rules.deep_copy()
    tokens = list(text.encode())
    return bool(state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting())


def objects(*members: str) -> list[str]:
    """Objects of these members, in each order."""
    return ["{" + ", ".join(ordered) + "}" for ordered in permutations(members)]


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "optional": (
        ABC,
        [*objects(A, B, C), *objects(A, C), *objects(B), "{}", '{"b":2,"a":1}'],
        [*objects(A, A), *objects(A, '"d": 4'), '{"a": 1, }', '{, "a": 1}', '{"a": 1 "b": 2}'],
    ),
    "required": (
        {**ABC, "required": ["c"]},
        [*objects(A, B, C), *objects(C)],
        [*objects(A, B), "{}"],
    ),
    "required without description": (
        {**AB, "required": ["z"]},
        objects(A, '"z": [1, {"q": null}]'),
        objects(A),
    ),
    "nested in a list": (
        {"type": "array", "items": {**AB, "required": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        ['[{"b": 2, "a": 1}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]'],
        ["[]", '[{"a": 1}]', '[{"b": 2, "a": 1}, {"b": 2, "a": 1}, {"b": 2, "a": 1}]'],
    ),
    "a definition": ({"$ref": "#/$defs/ab", "$defs": {"ab": AB}}, objects(A, B), objects(A, C)),
    "a recursive definition": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        ['{"children": [{"children": [], "a": 1}], "a": 2}', '{"a": 1, "children": []}'],
        ['{"children": [{"a": 1}]}'],
    ),
    "the root": (
        {"type": "object", "properties": {"next": {"$ref": "#"}, "a": NUMBER}},
        ['{"next": {"a": 1, "next": {}}, "a": 2}'],
        ['{"next": 1}'],
    ),
    "a part of the root": (
        {
            "type": "object",
            "properties": {
                "a": NUMBER,
                "b": {"prefixItems": [{"$ref": "#/properties/a"}], "type": "array"},
            },
        },
        ['{"b": [3], "a": 1}'],
        ['{"b": ["x"]}'],
    ),
    "an object or null": (
        {"anyOf": [AB, {"type": "null"}]},
        [*objects(A, B), "null"],
        ["1", *objects(A, C)],
    ),
    "several types": (
        {**AB, "type": ["object", "null", "string"]},
        [*objects(A, B), "null", '"text"'],
        ["1"],
    ),
    "either of two": (
        {**ABC, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [*objects(A, C), *objects(B, C), *objects(A, B, C)],
        [*objects(C), "{}"],
    ),
    "all of two": (
        {"type": "object", "allOf": [{**AB, "required": ["a"]}, {"properties": {"c": NUMBER}}]},
        [*objects(A, B, C), *objects(A, C)],
        [*objects(B, C)],
    ),
    "a kind with its own members": (
        {
            "type": "object",
            "properties": SHARED,
            "required": ["kind"],
            "oneOf": [
                {"properties": {"kind": {"const": "x"}, "b": NUMBER}, "required": ["b"]},
                {"properties": {"kind": {"const": "y"}}},
            ],
        },
        [*objects(A, '"kind": "x"', B), *objects('"kind": "y"', A)],
        [*objects('"kind": "x"', A), *objects('"kind": "z"'), *objects('"kind": "y"', B)],
    ),
    "other members": (
        {**AB, "additionalProperties": {"type": "boolean"}, "required": ["b"]},
        [*objects(B, '"x": true', A), *objects('"x": true', '"y": false', B)],
        [*objects(B, B), *objects(B, '"x": 1'), *objects('"x": true'), '{"a": true, "b": 2}'],
    ),
    "free members": (
        {**AB, "additionalProperties": True},
        [*objects(B, '"x": [1]', A)],
        [*objects(A, A)],
    ),
    "a record of objects": (
        {"type": "object", "additionalProperties": AB},
        ['{"x": {"b": 2, "a": 1}, "y": {}}', "{}"],
        ['{"x": {"c": 3}}', '{"x": 1}'],
    ),
    "a bounded number of members": (
        {**ABC, "minProperties": 1, "maxProperties": 2},
        [*objects(A), *objects(C, B)],
        ["{}", *objects(A, B, C)],
    ),
    "a forbidden member": (
        {"type": "object", "properties": {"a": NUMBER, "b": NUMBER, "c": False}},
        objects(A, B),
        objects(A, C),
    ),
    "a name that wants escapes": (
        {"type": "object", "properties": {'q"\\\n': NUMBER, "größe": NUMBER}},
        ['{"größe": 1, "q\\"\\\\\\n": 2}'],
        ['{"q": 1}'],
    ),
    "a keyword without grammar": (
        {**AB, "not": {"required": ["z"]}, "dependentRequired": {"a": ["b"]}},
        objects(A, B),
        objects(A, C),
    ),
    "keywords of no schema": (
        {**AB, "x-order": 1, "strict": True, "discriminator": {"propertyName": "a"}, "xml": {}},
        objects(A, B),
        [*objects(A, C), *objects(A, A)],
    ),
    "an id and an anchor": (
        {**AB, "$id": "https://example.org/a", "$anchor": "a"},
        objects(A, B),
        objects(A, C),
    ),
    "an id above references": (
        {"$id": "https://example.org/a", "$ref": "#/$defs/ab", "$defs": {"ab": AB}},
        objects(A, B),
        objects(A, C),
    ),
    "an escaped reference": (
        {"$ref": "#/definitions/Ab%3Cint%3E", "definitions": {"Ab<int>": AB}},
        objects(A, B),
        objects(A, C),
    ),
    "a reference into a list": (
        {"properties": {"x": {"anyOf": [AB]}, "y": {"$ref": "#/properties/x/anyOf/0"}}},
        ['{"y": {"b": 2, "a": 1}}'],
        ['{"y": {"c": 3}}'],
    ),
    "nullable": (
        {"properties": {"a": {**NUMBER, "nullable": True}, "b": {**AB, "nullable": True}}},
        ['{"b": null, "a": null}', '{"b": {"b": 2, "a": 1}, "a": 1}'],
        ['{"a": "x"}', '{"b": 1}', '{"b": {"a": null}}'],
    ),
    "nulls and lists of others": (
        {**AB, "required": None, "additionalProperties": None, "$defs": [], "minProperties": None},
        objects(A, B),
        objects(A, C),
    ),
    "a list or null": (
        {"type": ["array", "null"], "items": AB},
        ['[{"b": 2, "a": 1}]', "[]", "null"],
        ['[{"c": 3}]', "{}"],
    ),
    "a list without type": ({"items": AB}, ['[{"b": 2, "a": 1}]'], ['[{"c": 3}]']),
    "a list of kinds": (
        {"type": "array", "prefixItems": [AB, NUMBER, AB], "items": False, "minItems": 2},
        ['[{"b": 2, "a": 1}, 1]', '[{}, 1, {"b": 2, "a": 1}]'],
        ["[{}]", "[1, 1]", "[{}, 1, {}, 1]"],
    ),
    "a list of kinds and more": (
        {"type": "array", "items": [AB], "additionalItems": NUMBER, "maxItems": 3},
        ["[]", '[{"b": 2, "a": 1}]', "[{}, 1, 1]"],
        ["[1]", "[{}, {}]", "[{}, 1, 1, 1]"],
    ),
    "a record of TypeBox": (
        {"type": "object", "patternProperties": {"^(.*)$": AB}},
        ['{"x": {"b": 2, "a": 1}, "y": {}}', "{}"],
        ['{"x": 1}'],
    ),
    "names of a pattern": (
        {"patternProperties": {"^[0-9]+$": AB, "^x": NUMBER}, "additionalProperties": False},
        ['{"7": {"b": 2, "a": 1}, "xy": 1, "8": {}}'],
        ['{"7": 1}', '{"y": {}}'],
    ),
    "conditions may describe others": (
        {**AB, "if": {"required": ["a"]}, "then": {"properties": {"d": NUMBER}}},
        objects(A, '"d": 4', B),
        objects(A, A),
    ),
}


@pytest.mark.parametrize(("schema", "values", "others"), CASES.values(), ids=CASES)
def test_members_come_in_any_order(
    schema: dict[str, Any], values: list[str], others: list[str]
) -> None:
    rules = rules_of(schema)
    assert [text for text in values if not is_value(rules, text)] == []
    assert [text for text in others if is_value(rules, text)] == []


@pytest.mark.parametrize("n", [63, 64, 200])
def test_many_members(n: int) -> None:
    properties = {f"k{i}": NUMBER for i in range(n)}
    rules = rules_of({"type": "object", "properties": properties, "required": [f"k{n - 1}"]})
    members = [f'"k{i}": 1' for i in range(n)]
    for ordered in (members, members[::-1]):
        assert is_value(rules, "{" + ", ".join(ordered) + "}")
    assert not is_value(rules, "{" + ", ".join(members[:-1]) + "}")


def test_a_written_object_can_always_be_completed() -> None:
    random = Random(1)
    for name, (schema, _, _) in CASES.items():
        rules = rules_of(schema)
        for _ in range(20):
            state = rules.deep_copy()
            text = b""
            while not state.is_accepting():
                mask = state.compute_bitmask()
                allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
                assert allowed, (name, text)
                text += bytes([random.choice(allowed)])
                assert state.consume_token(text[-1])
                if len(text) > 400:
                    break


def test_a_schema_of_endless_depth_is_refused() -> None:
    schema: dict[str, Any] = AB
    for _ in range(2000):
        schema = {"type": "object", "properties": {"a": schema, "b": NUMBER}}
    with pytest.raises(BadRequest, match="the schema is too deep"):
        rules_of(schema)


def test_alternatives_that_refer_to_the_whole_end() -> None:
    circle = {"type": "object", "anyOf": [{"$ref": "#"}] * 10, "properties": {"a": NUMBER}}
    builder = LarkBuilder({})
    assert "%json" in builder.grammar(JsonRules(builder, circle).value(circle))


def test_alternatives_that_multiply_are_refused() -> None:
    deep: dict[str, Any] = ABC
    for _ in range(40):
        deep = {**ABC, "properties": {"a": deep, "b": NUMBER}, "anyOf": [{"required": ["a"]}, {}]}
    with pytest.raises(BadRequest, match=r"more than (10000 parts|5000 rules)"):
        rules_of(deep)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_format_has_its_arguments_in_any_order(name: str) -> None:
    walker = walker_of(name)
    keys = ("alpha", "beta", "gamma")
    properties = {key: {"enum": ["x", "y"]} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    tool = Tool("greet", "", parameters)
    orders = set()
    for seed in range(12):
        random = Random(f"{name} {seed}")
        text = walker.walk(walker.forced((tool,), is_single=True), random)
        (call,) = walker.read(walker.output_format.forced_opening + text, (tool,)).tool_calls
        orders.add(tuple(call.arguments))
    assert all(
        {(a, b), (b, a)} <= {(x, y) for keys in orders for x, y in combinations(keys, 2)}
        for a, b in combinations(keys, 2)
    )
