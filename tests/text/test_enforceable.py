"""One odd schema among the tools loosens itself; all others are enforced."""

import json
import logging
from typing import Any

import pytest

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.features.formats.argument_values import argument_value
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls
from mlxstack.service.parts.text_assembly import assemble_text_processor
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.text.grammar.enforceable import enforceable
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.schema_types import properties, schema_types

CITY = {"type": "string", "enum": ["Paris"]}
GOOD = Tool("weather", "", {"type": "object", "properties": {"city": CITY}, "required": ["city"]})
ODD: list[tuple[dict[str, Any], str]] = [
    ({"type": "any"}, "type"),
    ({"type": "str", "minLength": 1}, "type"),
    ({"type": "string", "pattern": "^([a-z"}, "pattern"),
    ({"type": "string", "pattern": "/^a$/i"}, "pattern"),
    ({"type": "string", "pattern": r"^a\Z"}, "pattern"),
    ({"type": "string", "pattern": {}}, "pattern"),
    ({"type": "string", "enum": "a"}, "enum"),
    ({"type": "string", "minLength": "1"}, "minLength"),
    ({"type": "array", "items": "string"}, "items"),
    ({"type": "object", "additionalProperties": "string"}, "additionalProperties"),
    ({"type": "object", "required": True}, "required"),
    ({"type": "object", "properties": "x"}, "properties"),
    ({"type": "string", "pattern": None}, ""),
    ({"type": "string", "enum": None}, ""),
    ({"type": "array", "items": None}, ""),
    ({"type": "object", "additionalProperties": None}, ""),
    ({"type": "object", "properties": [], "required": {}}, ""),
    ({"type": "string", "nullable": True}, ""),
    ({"$ref": "#/components/schemas/Foo"}, "$ref"),
    ({"$ref": "https://example.org/foo.json"}, "$ref"),
    ({"anyOf": [{"type": "string"}, {"type": "any"}]}, "anyOf/1/type"),
    ({"type": ["string", "file"]}, "type/1"),
    ({"type": "object", "properties": {"y": {"type": "int"}, "z": CITY}}, "properties/y/type"),
    ({"type": "integer", "minimum": "0"}, "minimum"),
]  # fmt: skip
odd_parts = pytest.mark.parametrize(("part", "path"), ODD)
"""Parts, and the paths of what is left out; "" for nothing."""


def tool_with(part: Any) -> Tool:
    properties = {"city": CITY, "x": part}
    return Tool("odd", "", {"type": "object", "properties": properties})


@pytest.fixture
def text_processor(chatml: Any) -> Any:
    made = assemble_text_processor(chatml, Preset(model=ModelSpec(id="tiny")), len(chatml))
    yield made
    made.threads.close(BadRequest("the test is over"))


def is_call(text_processor: TextProcessor, rules: Any, name: str, arguments: str) -> bool:
    """Whether the grammar permits a call, after the mark that begins it."""
    text = f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    tokens = text_processor.tokenizer.encode(text, add_special_tokens=False)
    matcher = rules.deep_copy()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


def check(text_processor: TextProcessor, rules: Any) -> None:
    assert is_call(text_processor, rules, "weather", '{"city": "Paris"}')
    assert not is_call(text_processor, rules, "weather", '{"city": "Rome"}')
    assert is_call(text_processor, rules, "odd", '{"city": "Paris"}')
    assert not is_call(text_processor, rules, "odd", '{"city": "Rome"}')


@odd_parts
async def test_a_forced_call_leaves_out_the_odd_part_alone(
    text_processor: TextProcessor, part: Any, path: str
) -> None:
    tools = (GOOD, tool_with(part))
    marks = text_processor.output_format.call_marks
    assert marks is not None
    check(
        text_processor,
        await text_processor.constraints.call_rules(ForcedCalls(tools, marks, is_single=True)),
    )
    expected = (f"odd/properties/x/{path}",) if path else ()
    assert text_processor.constraints.loose_schemas.of(tools) == expected


@odd_parts
async def test_an_optional_call_leaves_out_the_odd_part_alone(
    text_processor: TextProcessor, part: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    tools = (GOOD, tool_with(part))
    with caplog.at_level(logging.WARNING, "mlxstack.service"):
        for _ in range(2):
            trigger = await text_processor.constraints.free_calls(tools, is_single=False)
    assert trigger is not None
    check(text_processor, trigger.openings[0].rules())
    expected = [f"odd/properties/x/{path}"] if path else []
    assert text_processor.constraints.loose_schemas.paths == expected
    assert [path in record.message for record in caplog.records].count(True) == len(expected)


async def test_a_definition_that_refers_to_itself_is_any_value(
    text_processor: TextProcessor,
) -> None:
    odd = tool_with({"$ref": "#/$defs/loop"})
    loop = {**odd.parameters, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    tools = (GOOD, Tool("odd", "", loop))
    trigger = await text_processor.constraints.free_calls(tools, is_single=False)
    assert trigger is not None
    check(text_processor, trigger.openings[0].rules())
    assert text_processor.constraints.loose_schemas.of(tools) == ("odd/$defs/loop/$ref",)


async def test_parameters_that_are_no_object_are_one(text_processor: TextProcessor) -> None:
    tools = (Tool("odd", "", {"type": "array", "items": {"type": "boolean"}}), GOOD)
    marks = text_processor.output_format.call_marks
    assert marks is not None
    rules = await text_processor.constraints.call_rules(ForcedCalls(tools, marks, is_single=True))
    assert is_call(text_processor, rules, "odd", '{"a": 1}')
    assert not is_call(text_processor, rules, "odd", "[true]")
    assert text_processor.constraints.loose_schemas.of(tools) == ("odd/type",)


async def test_a_refused_schema_names_its_odd_part(text_processor: TextProcessor) -> None:
    properties = {"a": CITY, "x": {"type": "string", "pattern": "^([a-z"}}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(BadRequest, match="at /properties/x/pattern of the schema") as error:
        await text_processor.constraints.shape_rules(ResponseConstraint(schema))
    assert "x-guidance" not in str(error.value)
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    with pytest.raises(BadRequest, match="#/\\$defs/a refers to nothing but itself"):
        await text_processor.constraints.shape_rules(ResponseConstraint(loop))


async def test_the_message_of_a_refused_schema_is_about_its_place(
    text_processor: TextProcessor,
) -> None:
    faults = {"a": {"type": "string", "pattern": "["}, "b": {"type": "string", "minLength": -1}}
    for names in (["a", "b"], ["b", "a"]):
        schema = {"properties": {name: faults[name] for name in names}, "required": names}
        with pytest.raises(BadRequest) as error:
            await text_processor.constraints.shape_rules(ResponseConstraint(schema))
        first = {"a": ("a/pattern", "regex"), "b": ("b/minLength", "minLength")}[names[0]]
        place, reason = first
        assert f"/properties/{place} of the schema" in str(error.value)
        assert reason in str(error.value).partition("; this is")[0]


async def test_a_fault_in_a_definition_is_placed_there(text_processor: TextProcessor) -> None:
    leaf = {"$defs": {"leaf": {"type": "string", "pattern": "["}, "unused": {"type": "any"}}}
    schema = {**leaf, "properties": {"x": {"$ref": "#/$defs/leaf"}}, "required": ["x"]}
    with pytest.raises(BadRequest, match=r"at /\$defs/leaf/pattern of the schema"):
        await text_processor.constraints.shape_rules(ResponseConstraint(schema))


def large(name: str, n: int) -> Tool:
    properties = {f"a long name for member {i} of the {name} object": CITY for i in range(n)}
    return Tool(name, "", {"type": "object", "properties": properties})


async def test_a_huge_tool_leaves_the_grammar_of_others(text_processor: TextProcessor) -> None:
    tools = (GOOD, large("huge", 450), large("large", 350), tool_with({"type": "any"}))
    marks = text_processor.output_format.call_marks
    assert marks is not None
    trigger = await text_processor.constraints.free_calls(tools, is_single=False)
    assert trigger is not None
    for rules in (
        await text_processor.constraints.call_rules(ForcedCalls(tools, marks, is_single=True)),
        trigger.openings[0].rules(),
    ):
        check(text_processor, rules)
        assert is_call(text_processor, rules, "huge", '{"x": 1}')
        assert not is_call(text_processor, rules, "large", '{"x": 1}')
    loose = text_processor.constraints.loose_schemas.of(tools)
    assert sorted(loose) == ["huge", "odd/properties/x/type"]


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": "number"}, {"type": "number", "minimum": 0}, {}]
)
async def test_the_digits_of_a_number_end(text_processor: TextProcessor, schema: Any) -> None:
    rules = await text_processor.constraints.shape_rules(
        ResponseConstraint({"type": "array", "items": schema})
    )
    for digits in ("1" * 30, "0." + "0" * 30):
        tokens = text_processor.tokenizer.encode(f"[{digits}]", add_special_tokens=False)
        assert rules is not None
        assert rules.deep_copy().try_consume_tokens(tokens) < len(tokens)


def test_the_largest_part_that_fits_is_found() -> None:
    schema = {"type": "object", "properties": {"a": {"b": [1, {"bad": 0}]}, "c": 1}, "bad": 2}
    part = enforceable(schema, lambda one: "is bad" if '"bad"' in json.dumps(one) else None)
    assert part.schema == {"type": "object", "properties": {"a": {"b": [1]}, "c": 1}}
    assert [lost.path for lost in part.left_out] == ["/properties/a/b/1", "/bad"]
    assert {lost.reason for lost in part.left_out} == {"is bad"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/definitions/A", "definitions": {"A": GOOD.parameters}},
        {"allOf": [GOOD.parameters, {"properties": {}}]},
    ],
)
def test_arguments_behind_a_reference_are_known(parameters: dict[str, Any]) -> None:
    assert properties(parameters) == {"city": (CITY, True)}
    either = {"anyOf": [GOOD.parameters, {"properties": {"at": {}}}]}
    assert set(properties(either)) == {"city", "at"}
    assert not any(is_required for _, is_required in properties(either).values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"edit"', "edit"),
        ("'edit'", "edit"),
        ("`edit`", "edit"),
        ("\u201cedit\u201d", "edit"),
        ("\u2018edit\u2019", "edit"),
        ('\\"edit\\"', "edit"),
        ("`write`", "`write`"),
        ("`edit", "`edit"),
        ("\"edit'", "\"edit'"),
        ('"x"', '"x"'),
    ],
)
def test_a_listed_text_may_stand_in_quotes(text: str, value: str) -> None:
    types = schema_types({"type": "string", "enum": ["edit", "write", "`write`"]}, {})
    assert argument_value(text, types) == value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ('"5"', {"type": "integer"}, 5),
        ("'true'", {"type": "boolean"}, True),
        ('"2"', {"enum": [1, 2]}, 2),
        ('"5"', {"type": "string"}, '"5"'),
        ('"a"', {"type": "integer"}, "a"),
    ],
)
def test_a_number_may_stand_in_quotes(text: str, schema: dict[str, Any], value: Any) -> None:
    assert argument_value(text, schema_types(schema, {})) == value
