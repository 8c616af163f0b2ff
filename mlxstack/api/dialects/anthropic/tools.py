"""The tools of a request: those it declares, and those that join in mid-conversation."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mlxstack.api.dialects.anthropic.content_blocks import ToolAddition, ToolRemoval, read
from mlxstack.api.dialects.anthropic.request_schema import MessagesBody, ToolChoice, ToolParam
from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation_options import ToolChoiceMode
from mlxstack.text.normalize_messages import Definitions, removal_note

CHOICES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.REQUIRED,
    "none": ToolChoiceMode.NONE,
}


def declared(body: MessagesBody) -> tuple[Tool, ...]:
    """All tools, in order; those that join later count as deferred (A-20, A-21)."""
    head = [
        _tool(spec, f"tools[{i}]", bool(spec.defer_loading))
        for i, spec in enumerate(body.tools or ())
        if not _is_foreign(spec)
    ]
    names = {tool.name for tool in head}
    return (*head, *(tool for tool in _joining(body) if tool.name not in names))


def choice(wanted: ToolChoice | None, tools: Iterable[Tool]) -> ToolChoiceMode:
    """Whether there must be a call. Raises BadRequest."""
    if wanted is None:
        return ToolChoiceMode.AUTO
    found = CHOICES.get(wanted.type)
    if found is None:
        raise BadRequest(
            f"tool_choice.type is {wanted.type!r}; known are {', '.join(CHOICES)}",
            "tool_choice.type",
        )
    if wanted.type == "tool" and wanted.name not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice.name: no tool is named {wanted.name!r}", "tool_choice.name")
    return found


def addition(block: ToolAddition, tools: Definitions) -> str:
    """The text that stands for a tool that joins here."""
    name = _name(block.tool) or _name(block.tool.get("definition"))
    return tools.text([name]) if name else ""


def removal(block: ToolRemoval) -> str:
    """The text that stands for a tool that leaves here."""
    name = _name(block.tool)
    return removal_note(name) if name else ""


def _joining(body: MessagesBody) -> Iterator[Tool]:
    for i, turn in enumerate(body.messages):
        if turn.role != "system":
            continue
        for block in read(turn.content, f"messages[{i}].content"):
            definition = block.tool.get("definition") if isinstance(block, ToolAddition) else None
            if isinstance(definition, dict) and _name(definition):
                yield _defined(definition, f"messages[{i}].content")


def _defined(definition: dict[str, Any], at: str) -> Tool:
    try:
        return _tool(msgspec.convert(definition, ToolParam), at, is_deferred=True)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{at}: the definition of a tool cannot be read: {error}", at) from None


def _tool(spec: ToolParam, at: str, is_deferred: bool) -> Tool:
    if not spec.name:
        raise BadRequest(f"{at}.name: Field required", f"{at}.name")
    return Tool(spec.name, spec.description or "", spec.input_schema or {}, is_deferred)


def _is_foreign(spec: ToolParam) -> bool:
    """Run by a vendor's server, which is not here."""
    return spec.type not in (None, "custom") and spec.input_schema is None


def _name(tool: Any) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else ""
