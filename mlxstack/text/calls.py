"""The text of a tool call to the call it means, by mlx-lm's parsers."""

from collections.abc import Callable, Iterable
from typing import Any

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.text.normal import parse_arguments

Shapes = list[dict[str, Any]]
Parser = Callable[[str, Shapes], Any]


def tool_shapes(tools: Iterable[Tool]) -> Shapes:
    """Tools in OpenAI's form, which the parsers need to know the types of arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def parse_calls(parser: Parser, text: str, shapes: Shapes) -> tuple[ToolCall, ...]:
    """The calls in the text between two markers; none when it makes no sense.

    `id` is the model's own where it wrote one, else "".
    """
    try:
        parsed = parser(text, shapes)
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError):
        return ()
    calls = tuple(_call(item) for item in (parsed if isinstance(parsed, list) else [parsed]))
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def _call(parsed: Any) -> ToolCall | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = parse_arguments(parsed.get("arguments"))
    if not parsed["name"] or isinstance(arguments, str):
        return None
    own_id = parsed.get("id")
    return ToolCall(own_id if isinstance(own_id, str) else "", parsed["name"], arguments)
