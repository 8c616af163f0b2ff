"""Tool choice of OpenAI's APIs."""

from collections.abc import Callable, Sequence
from typing import Any

from mlxstack.core.errors import BadRequest
from mlxstack.service.parts.generation_options import ToolChoiceMode


def tool_choice_mode(choice: Any) -> ToolChoiceMode:
    """Tool choice of OpenAI's APIs. Raises BadRequest.

    Some clients write a word into an object, and Mistral's or Anthropic's `any`.
    """
    match choice:
        case None:
            word = "auto"
        case "any" | {"type": "any"}:
            word = "required"
        case dict() if chosen_tool(choice) is not None:
            word = "required"
        case {"allowed_tools": {"mode": word}} | {"mode": word} | {"type": word} | word:
            pass
    if word not in list(ToolChoiceMode):
        raise BadRequest(
            f"tool_choice is {choice!r}; known are none, auto, required, or a tool that the client "
            "runs, and not a vendor's servers",
            "tool_choice",
        )
    return ToolChoiceMode(word)


def require_offered(kinds: Sequence[str], n_offered: int) -> None:
    """Raise BadRequest for tools of these types of which none is offered."""
    if kinds and not n_offered:
        raise BadRequest(
            f"tools[0].type is {kinds[0]!r}, which is not offered here: a tool that runs on a "
            "vendor's servers, or has no schema; offer a function that the client runs",
            "tools[0].type",
        )


def allowed_tools(choice: Any, name_of: Callable[[Any], str | None]) -> tuple[str, ...]:
    """Names of the tools that a `tool_choice` allows; none if all are."""
    match choice:
        case {"tools": list(tools)} | {"allowed_tools": {"tools": list(tools)}}:
            return tuple(filter(None, map(name_of, tools)))
    return ()


def chosen_tool(choice: Any) -> str | None:
    """Name of the tool in a `tool_choice`, in either form."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get("function") or choice.get("custom")
    if not isinstance(inner, dict):
        inner = choice
    name = inner.get("name")
    if isinstance(name, str):
        return name
    return None
