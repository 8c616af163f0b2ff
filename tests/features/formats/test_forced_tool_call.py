"""A forced call has a tool's name and valid arguments, in the words of every family."""

import json
from itertools import cycle
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.checked_calls import tool_schemas
from mlxstack.features.formats.grammar.forced_tool_call import (
    CallDelimiters,
    ForcedCalls,
    call_grammar,
)
from mlxstack.features.formats.output_format import forced_opening
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.tokens.special_tokens import nameless
from tests.features.formats.syntaxes import FORMATS
from tests.repetition import in_soak

pytestmark = pytest.mark.slow

LEAVES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{1,3}/[0-9]$"},
    {"type": "string", "pattern": "^x[0-9]|y$", "maxLength": 6},
    {"type": "string", "enum": ["red", 'quo"te', "two\nlines", "</parameter>"]},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "boolean"},
    {"type": ["string", "null"], "maxLength": 4},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "maximum": 9}]},
    {"enum": ["a", 7, None, True]},
    {"const": "c1"},
    {"$ref": "#/$defs/Colour"},
]
NESTED: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"to": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22]}},
    "required": ["name"],
    "additionalProperties": False,
}
DEFINITIONS = {"Colour": {"type": "string", "enum": ["red", "green"]}}


def values(*, is_flat: bool) -> list[dict[str, Any]]:
    """Schemas of an argument."""
    return LEAVES if is_flat else [*LEAVES, *NESTED]


def parameters(random: Random, *, is_flat: bool) -> dict[str, Any]:
    keys = [f"key_{i}" for i in range(random.randrange(4))]
    return with_properties({key: random.choice(values(is_flat=is_flat)) for key in keys}, random)


def with_properties(properties: dict[str, Any], random: Random) -> dict[str, Any]:
    """An object of which about half of the properties are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if random.random() < 0.5],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }


def tokens_in(mask: bytes, n_vocab: int) -> list[int]:
    """The tokens of a vocabulary that a mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:n_vocab]
    return list(map(int, np.flatnonzero(bits)))


def written(tokenizer: Any, rules: LLMatcher, random: Random, *, stops_at_once: bool = True) -> str:
    """A random walk through the grammar, which ends where it may, or half of the time."""
    rules = rules.deep_copy()
    tokens = []
    eos = tokenizer.eos_token_ids
    n_vocab = len(tokenizer)
    while not rules.is_stopped() and len(tokens) < 1200:
        mask = rules.compute_bitmask()
        allowed = tokens_in(mask, n_vocab)
        assert allowed, tokenizer.decode(tokens)
        may_stop = bool(eos & set(allowed)) and (stops_at_once or random.random() < 0.5)
        others = [token for token in allowed if token not in eos]
        token = next(iter(eos)) if may_stop or not others else random.choice(others)
        assert rules.consume_token(token), rules.get_error()
        tokens += [] if token in eos else [token]
    return str(tokenizer.decode(tokens))


ALL = pytest.mark.parametrize("name", FORMATS)


def marks_of(name: str, special: dict[str, int]) -> CallDelimiters:
    found = FORMATS[name]
    assert found.calls is not None
    head = "" if found.channels is None else found.channels.call_head
    is_last = found.channels is not None
    return CallDelimiters(found.calls, forced_opening(found), special, head, is_last)


def read_back(name: str, text: str, tools: tuple[Tool, ...]) -> tuple[ToolCall, ...]:
    """The calls of a forced answer, which holds nothing else."""
    whole = forced_opening(FORMATS[name]) + text
    message = read_answer(FORMATS[name], whole, tools)
    assert (message.content, message.reasoning_content, message.n_unparsed) == ("", "", 0), whole
    return message.tool_calls


@pytest.fixture(params=["chatml", "tagged"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """One that spells the marks out, and one that has a token for each."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("n_schemas", [8, *in_soak(20)])
@ALL
def test_every_walk_is_a_call_with_valid_arguments(
    tokenizer: Any, name: str, n_schemas: int
) -> None:
    """Tools of none to three arguments; eight pairs have each kind of value at least once."""
    grammars = GrammarCompiler(tokenizer, len(tokenizer))
    marks = marks_of(name, nameless(tokenizer))
    kinds = values(is_flat=name == "function_gemma")
    dealt = cycle(Random(name).sample(kinds, len(kinds)))
    for seed in range(n_schemas):
        random = Random(f"{name} {seed}")
        properties = [
            {f"key_{i}": next(dealt) for i in range((2 * seed + at) % 4)} for at in range(2)
        ]
        tools = tuple(
            Tool(tool, "", with_properties(each, random))
            for tool, each in zip(("greet", "visit"), properties, strict=True)
        )
        rules = grammars.compile(
            call_grammar(ForcedCalls(tools, marks, is_single=True)).text, "tools"
        )
        assert rules is not None
        for walk in range(3):
            text = written(tokenizer, rules, Random(walk))
            assert_valid(read_back(name, text, tools), tools)


def assert_valid(calls: tuple[ToolCall, ...], tools: tuple[Tool, ...]) -> None:
    (call,) = calls
    (tool,) = (one for one in tools if one.name == call.name)
    jsonschema.validate(call.arguments, tool.parameters)


@ALL
def test_several_calls_are_read_back_one_by_one(tokenizer: Any, name: str) -> None:
    marks = marks_of(name, nameless(tokenizer))
    nothing = {"type": "object", "additionalProperties": False}
    tools = (Tool("greet", "", PERSON), Tool("visit", "", nothing))
    asked = call_grammar(ForcedCalls(tools, marks, is_single=False)).text
    rules = GrammarCompiler(tokenizer, len(tokenizer)).compile(asked, "tools")
    assert rules is not None
    most = 0
    for walk in range(12):
        text = written(tokenizer, rules, Random(walk), stops_at_once=False)
        calls = read_back(name, text, tools)
        for call in calls:
            assert_valid((call,), tools)
        most = max(most, len(calls))
    assert most == 1 if marks.is_last or marks.syntax.is_bare else most > 1


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("pythonic", Tool("get-weather")),
        ("pythonic", Tool("f", "", {"properties": {"from": {}}, "required": ["from"]})),
        ("qwen3_coder", Tool("f", "", {"properties": {"a b": {}}, "required": ["a b"]})),
        ("function_gemma", Tool("f", "", {"required": ["x"], "properties": {"x": NESTED[0]}})),
    ],
)
def test_what_a_family_has_no_words_for_is_refused(chatml: Any, name: str, tool: Tool) -> None:
    marks = marks_of(name, {})
    with pytest.raises(BadRequest, match=tool.name):
        call_grammar(ForcedCalls((tool,), marks, is_single=True))
    both = call_grammar(ForcedCalls((tool, Tool("other")), marks, is_single=True)).text
    assert "other" in both
    assert tool.name not in both[0].replace("function", "")


def read(name: str, text: str, schema: dict[str, Any]) -> Any:
    """The argument `x`, sampled as `text` by a model of this family."""
    (call,) = called(name, text, schema)
    assert isinstance(call.arguments, dict)
    return call.arguments["x"]


def called(name: str, text: str, schema: dict[str, Any]) -> tuple[ToolCall, ...]:
    tools = (Tool("f", "", {"type": "object", "properties": {"x": schema}}),)
    written = {
        "json_tools": f'<tool_call>{{"name": "f", "arguments": {{"x": {text}}}}}</tool_call>',
        "qwen3_coder": f"<tool_call><function=f>\n<parameter=x>\n{text}\n</parameter>\n"
        "</function></tool_call>",
        "glm47": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value></tool_call>",
    }[name]
    return read_answer(FORMATS[name], written, tools).tool_calls


OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
OPTIONAL_NUMBER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47"])
def test_an_optional_argument_keeps_its_type(name: str) -> None:
    assert read(name, "5", OPTIONAL_NUMBER) == 5
    assert read(name, "null", OPTIONAL_NUMBER) is None
    assert read(name, "5", OPTIONAL_TEXT) == "5"
    assert read(name, "null", OPTIONAL_TEXT) is None
    assert read(name, '{"a": 1}', {"$ref": "#/$defs/missing"}) == {"a": 1}


@pytest.mark.parametrize("text", ["...", "{1, 2}", "b'x'", "1e999", "1j", "(1, 2)"])
def test_what_looks_like_python_is_still_json(text: str) -> None:
    value = read("glm47", text, {})
    json.dumps(value, allow_nan=False)


def test_a_number_beyond_all_bounds_is_text() -> None:
    (call,) = called("qwen3_coder", "1e999", {"type": "integer"})
    assert list(call.arguments.values()) == ["1e999"]


def test_a_schema_that_turns_in_circles_hangs_nothing(chatml: Any) -> None:
    again = [{"$ref": "#/$defs/Tree"}] * 10
    tree = {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {f"k{i}": one for i, one in enumerate(again)}},
            *again,
        ]
    }
    schema = {"type": "object", "properties": {"x": tree}, "$defs": {"Tree": tree}}
    tools = (Tool("f", "", schema),)
    assert tool_schemas(tools)[0]["function"]["parameters"]["properties"]["x"] == {"type": "object"}
    for name in FORMATS:
        marks = marks_of(name, nameless(chatml))
        if name == "gemma4":
            with pytest.raises(BadRequest, match="5000 rules"):
                call_grammar(ForcedCalls(tools, marks, is_single=True))
        else:
            assert call_grammar(ForcedCalls(tools, marks, is_single=True))


def test_deep_arguments_are_no_call_rather_than_an_error() -> None:
    deep = "[" * 900 + "]" * 900
    for name in ("json_tools", "qwen3_coder", "glm47"):
        found = called(name, deep, {"type": "array"})
        assert all(isinstance(call.arguments, dict) for call in found)
