"""Custom tools, whose one argument is free text: schema and input."""

import re
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import InputGrammar, Tool
from mlxstack.text.normalize_messages import parse_arguments

# The one argument of a custom tool in the prompt.
INPUT = "input"
INPUT_OPENS = f'{{"{INPUT}":"'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input, as plain text"}},
    "required": [INPUT],
}
_JSON_TEXT = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')


class CustomTools(Struct, frozen=True):
    """Names of the custom tools of a body."""

    names: frozenset[str] = frozenset()
    are_functions: bool = False
    """Calls are sent as those of functions, with the input in place of the arguments.

    Cursor runs custom tools, but looks for each call in `function`.
    """


NO_CUSTOM_TOOLS = CustomTools()


def custom_tool(
    name: str, text: str | None, form: dict[str, Any] | None, is_deferred: bool = False
) -> Tool:
    """Custom tool as a function of one text.

    The description has its grammar. The chat API puts syntax and definition into `grammar`, the
    Responses API next to the type.
    """
    form = form or {}
    inner = form.get("grammar")
    notation = inner if isinstance(inner, dict) else form
    syntax = notation.get("syntax")
    definition = notation.get("definition")
    lines = [text or ""]
    grammar = None
    if isinstance(definition, str) and definition:
        lines.append(f"The input follows this {syntax or ''} grammar:\n{definition}")
        grammar = InputGrammar(str(syntax), definition)
    description = "\n\n".join(line for line in lines if line)
    return Tool(name, description, SCHEMA, is_deferred, grammar)


def input_text(arguments: dict[str, Any], arguments_json: str) -> str:
    """Input of a call; its JSON where a model wrote another argument."""
    text = arguments.get(INPUT)
    return text if isinstance(text, str) else arguments_json


def call_arguments(arguments: Any) -> dict[str, Any] | str:
    """Arguments of a call, which may be the input itself."""
    parsed = parse_arguments(arguments)
    if isinstance(arguments, str) and not (isinstance(parsed, dict) and INPUT in parsed):
        return {INPUT: arguments}
    return parsed


class InputDecoder:
    """Decoder of a call's arguments, in pieces of JSON, to the input."""

    def __init__(self) -> None:
        self._arguments = ""
        self._n_read = 0

    def add(self, piece: str) -> str:
        """New text of the input."""
        self._arguments += piece
        if not self._arguments.startswith(INPUT_OPENS):
            return ""
        # Every piece ends between two characters of its text.
        start = max(self._n_read, len(INPUT_OPENS))
        match = _JSON_TEXT.match(self._arguments, start)
        self._n_read = match.end() if match else start
        return msgspec.json.decode(f'"{self._arguments[start : self._n_read]}"', type=str)

    def end(self) -> str:
        """Text of a complete call that was not sent in pieces."""
        if self._n_read:
            return ""
        return input_text(msgspec.json.decode(self._arguments), self._arguments)
