"""Parses tool-call text, with mlx-lm's parsers as fallback."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.text.normalize_messages import parse_arguments, writable
from mlxstack.text.schema_types import declared

ToolSchemas = list[dict[str, Any]]
Parser = Callable[[str, ToolSchemas], Any]
# What parsers raise for text that is no call: `float` and `int` of huge numbers, too.
UNREADABLE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


def tool_schemas(tools: Iterable[Tool]) -> ToolSchemas:
    """Tools in OpenAI's form, for parsers that need argument types."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": declared(tool.parameters),
            },
        }
        for tool in tools
    ]


def parse_calls(parser: Parser, text: str, shapes: ToolSchemas) -> tuple[ToolCall, ...]:
    """Calls in the text between two marks; none if unparsable.

    `id` is the model's own where it wrote one, else "".
    """
    try:
        parsed = parser(text, shapes)
        items = parsed if isinstance(parsed, list) else [parsed]
        return tuple(_call(item, shapes) for item in items)
    except UNREADABLE:
        return ()


def _call(parsed: Any, shapes: ToolSchemas) -> ToolCall:
    call = checked_call(parsed.get("name"), parsed.get("id"), parsed.get("arguments"))
    assert isinstance(call.arguments, dict)
    nullable = _nullable(call.name, shapes)
    values = {
        key: None if value == "null" and key in nullable else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=values)


def checked_call(name: Any, call_id: Any, arguments: Any) -> ToolCall:
    """Call as JSON values. Raises ValueError without name or arguments."""
    values_by_key = parse_arguments(arguments)
    if not isinstance(name, str) or not name or isinstance(values_by_key, str):
        raise ValueError(f"no call: {name!r}")
    values = {writable(str(key)): plain(value) for key, value in values_by_key.items()}
    return ToolCall(writable(call_id) if isinstance(call_id, str) else "", writable(name), values)


def _nullable(name: str, shapes: ToolSchemas) -> frozenset[str]:
    """Arguments of text or null, which simple parsers confuse."""
    named = (shape["function"] for shape in shapes if shape["function"]["name"] == name)
    pairs = (pair for shape in named for pair in shape["parameters"].get("properties", {}).items())
    return frozenset(key for key, schema in pairs if schema.get("nullable") is True)


def plain(value: Any) -> Any:
    """Value as JSON; parsers may return any Python literal."""
    match value:
        case dict():
            return {writable(str(key)): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case str():
            return writable(value)
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
    return writable(str(value))
