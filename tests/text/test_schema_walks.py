"""Walks over schemas end, whatever their references and choices are."""

import json
import signal
from typing import Any

import pytest

from mlxstack.core.conversation import Tool
from mlxstack.features.formats.argument_values import ANY, ArgumentTypes
from mlxstack.features.formats.checked_calls import tool_schemas
from mlxstack.text.schema_types import argument_types, properties
from mlxstack.text.template.adaptation import TemplateCapabilities
from mlxstack.text.template.tool_definitions import MAX_EXPANDED, completed_tools
from tests.text.test_expressions import ended_by

LIMIT_S = 5
"""CPU seconds for walks that take some milliseconds."""
WIDE = {f"k{i}": {"type": "integer"} for i in range(20_000)}
CHAIN: Any = {"properties": WIDE}
for _ in range(150):
    CHAIN = {"allOf": [CHAIN], "properties": {"x": {"anyOf": [{"type": "string"}]}}}

BOMBS: dict[str, dict[str, Any]] = {
    "itself a thousand times": {"type": "object", "allOf": [{"$ref": "#"}] * 1000},
    "itself by other names": {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(40)]}
                  for i in range(40)},
        "allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}],
        "properties": {f"a{i}": {"$ref": f"#/$defs/d{i}"} for i in range(40)},
    },
    "a wide one by each of many": {
        "$defs": {"wide": {"type": "object", "properties": WIDE},
                  "choices": {"anyOf": [{"const": i} for i in range(20_000)]}},
        "properties": {
            **{f"p{i}": {"$ref": "#/$defs/wide"} for i in range(110)},
            **{f"c{i}": {"$ref": "#/$defs/choices", "title": "c"} for i in range(3000)},
        },
    },
    "one choice in one choice": {"properties": {"a": CHAIN, "b": CHAIN}, **CHAIN},
}  # fmt: skip


def walk(bomb: dict[str, Any]) -> None:
    """Every walk of the service over a tool's schema."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    tools = (Tool("bomb", "", bomb), Tool("other", "", bomb))
    types = ArgumentTypes(tools)
    for tool in tools:
        assert types.of(tool.name, "unknown") is not None
        assert not types.declares(tool.name, "unknown")
    tool_schemas(tools)
    for takes_references in (True, False):
        capabilities = TemplateCapabilities(
            takes_references=takes_references, shows_references=takes_references
        )
        json.dumps([tool.parameters for tool in completed_tools(tools, capabilities)])


@pytest.mark.parametrize("name", BOMBS)
def test_walks_over_a_schema_end(name: str) -> None:
    assert ended_by(lambda: walk(BOMBS[name])) == 0


def test_references_of_a_request_add_a_bounded_number_of_keywords() -> None:
    wide = {"type": "object", "properties": WIDE}
    bomb = {
        "$defs": {"wide": wide},
        "properties": {f"p{i}": {"$ref": "#/$defs/wide"} for i in range(20)},
    }
    capabilities = TemplateCapabilities(takes_references=False, shows_references=False)
    tools = completed_tools([Tool("bomb", "", bomb)] * 2, capabilities)
    n_properties = sum(
        len(part.get("properties", {}))
        for tool in tools
        for part in tool.parameters["properties"].values()
    )
    assert len(WIDE) <= n_properties <= MAX_EXPANDED + len(WIDE)


def test_arguments_behind_references_are_known_once_and_the_nearest_counts() -> None:
    schema = {
        "$ref": "#/$defs/base",
        "allOf": [{"properties": {"a": {"type": "integer"}, "c": {}}, "required": ["c"]}],
        "anyOf": [{"properties": {"d": {}}, "required": ["d"]}, {"$ref": "#/$defs/base"}],
        "properties": {"a": {"type": "string"}},
        "$defs": {"base": {"properties": {"b": {}, "a": {}}, "required": ["b"]}},
    }
    arguments = properties(schema)
    assert {key: needed for key, (_, needed) in arguments.items()} == {
        "a": False, "b": True, "c": True, "d": False,
    }  # fmt: skip
    assert arguments["a"][0] == {"type": "string"}


def test_types_beyond_the_bound_are_any() -> None:
    many = {"properties": {f"p{i}": {"type": "integer"} for i in range(30_000)}}
    types = argument_types(many)
    assert types["p0"] != ANY
    assert types["p29999"] == ANY
