"""Tools of the Messages API whose `type` has a date: Anthropic publishes what they take.

The client runs some of them, Anthropic's servers the others.
"""

import re
from collections.abc import Sequence
from typing import Any

from mlxstack.api.dialects.anthropic.request_schema import ToolChoice, ToolParam
from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest

Properties = dict[str, Any]

# Types of tools whose schema is in the request: Anthropic's, and that of OpenAI's API.
PLAIN_TYPES = (None, "custom", "function")
COMPUTER = "computer_"
# Names and fields of older clients: only their editor has the command undo_edit.
OLD_EDITOR = "str_replace_editor"

_DATE = re.compile(r"_\d{8}$")
_TEXT = {"type": "string"}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to view, counted from 1; -1 is the end of the file.",
}
_EDITS: Properties = {
    "file_text": {**_TEXT, "description": "Content of the file to create."},
    "old_str": {**_TEXT, "description": "Text to replace; it must occur exactly once."},
    "new_str": {**_TEXT, "description": "Text in its place."},
    "insert_line": {
        "type": "integer",
        "description": "Number of the line to insert after; 0 is the beginning of the file.",
    },
    "view_range": _LINES,
}


def _commands(names: Sequence[str], properties: Properties, required: Sequence[str]) -> Properties:
    """Schema of a tool whose `command` decides about the other fields."""
    return {
        "type": "object",
        "properties": {"command": {**_TEXT, "enum": list(names)}, **properties},
        "required": ["command", *required],
    }


_BASH: Properties = {
    "type": "object",
    "properties": {
        "command": {**_TEXT, "description": "Command to run; not needed for a restart."},
        "restart": {"type": "boolean", "description": "True restarts the shell."},
    },
}
_PATH = {"path": {**_TEXT, "description": "Absolute path of the file or folder."}}
_EDITOR = _commands(
    ("view", "create", "str_replace", "insert"),
    {**_PATH, **_EDITS, "insert_text": {**_TEXT, "description": "Text to insert."}},
    ("path",),
)
_EDITOR_WITH_UNDO = _commands(
    ("view", "create", "str_replace", "insert", "undo_edit"), {**_PATH, **_EDITS}, ("path",)
)
_MEMORY = _commands(
    ("view", "create", "str_replace", "insert", "delete", "rename"),
    {
        "path": {**_TEXT, "description": "Path below /memories."},
        **_EDITS,
        "insert_text": {**_TEXT, "description": "Text to insert."},
        "old_path": {**_TEXT, "description": "Path to rename."},
        "new_path": {**_TEXT, "description": "New path."},
    },
    (),
)
# Description and schema by the type without its date.
CLIENT_TOOLS: dict[str, tuple[str, Properties]] = {
    "bash": ("Run a command in a persistent bash session.", _BASH),
    "text_editor": ("View, create and edit text files.", _EDITOR),
    "memory": ("Read and write files that outlast the conversation, in /memories.", _MEMORY),
}


def client_tool(spec: ToolParam, is_deferred: bool) -> Tool | None:
    """Tool that the client runs, with its published schema, or None."""
    published = CLIENT_TOOLS.get(_DATE.sub("", spec.type or ""))
    if published is None or spec.input_schema is not None or not spec.name:
        return None
    text, schema = published
    if spec.name == OLD_EDITOR:
        schema = _EDITOR_WITH_UNDO
    return Tool(spec.name, spec.description or text, schema, is_deferred)


def is_server_tool(spec: ToolParam) -> bool:
    """True for a tool that runs on Anthropic's servers: it has a type and no schema."""
    is_typed = spec.type not in PLAIN_TYPES and spec.input_schema is None
    return is_typed and _DATE.sub("", spec.type or "") not in CLIENT_TOOLS


def omitted_tools(specs: Sequence[ToolParam]) -> tuple[str, ...]:
    """Names of the tools that are not offered to the model."""
    return tuple(_label(spec) for spec in specs if is_server_tool(spec))


def require_runnable(specs: Sequence[ToolParam], choice: ToolChoice | None) -> None:
    """Raise BadRequest for tools that a request needs and that do not run here.

    A server tool may only stand beside others, from which the model can choose.
    """
    forced = choice.name if choice and choice.type == "tool" else None
    are_alone = all(is_server_tool(spec) for spec in specs)
    for i, spec in enumerate(specs):
        if not is_server_tool(spec):
            continue
        if (spec.type or "").startswith(COMPUTER):
            raise BadRequest(
                f"tools[{i}]: {spec.type} is not supported: its results are images, which no model "
                "of this service reads; offer bash or a tool of your own",
                f"tools[{i}].type",
            )
        if are_alone or (forced is not None and spec.name == forced):
            param = "tool_choice.name" if forced == spec.name else f"tools[{i}].type"
            raise BadRequest(
                f"{param}: {_label(spec)} is of type {spec.type}, a tool that runs on Anthropic's "
                "servers and not here; offer a tool with an input_schema that the client runs, "
                "such as one of an MCP server",
                param,
            )


def _label(spec: ToolParam) -> str:
    return spec.name or spec.type or ""
