"""What an answer must look like, and the grammar that says so to llguidance.

White space between the parts of a JSON text is at most one space, so that no model can fill its
answer with it.
"""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
LENIENT = {**JSON_OPTIONS, "lenient": True}
MAX_CHARS = 1_000_000


class Shape(Struct, frozen=True):
    """A JSON schema, or a grammar in llama.cpp's or Lark's notation, if it is given.

    `param` is the field it came in, for errors.
    """

    schema: dict[str, Any] | None = None
    grammar: str | None = None
    param: str = "response_format"


class Calls(Struct, frozen=True):
    """The calls of these tools, after the mark that opens the first one.

    `again` opens one more, and is empty if there must be one only; `end` closes each.
    Both are written as in a Lark grammar.
    """

    tools: tuple[Tool, ...]
    again: str
    end: str


def grammars(shape: Shape) -> tuple[str, ...]:
    """The grammar, and if there is one, another that ignores what cannot be enforced.

    Raises BadRequest for what is no grammar, or is too large.
    """
    if shape.grammar is not None:
        _bound(shape.grammar, shape.param)
        try:
            return (LLMatcher.grammar_from_lark(any_to_lark(shape.grammar)),)
        except Exception as error:
            raise BadRequest(f"{shape.param}: {error}", shape.param) from None
    schema = shape.schema or {"type": "object"}
    _bound(json.dumps(schema), shape.param)
    return tuple(
        LLMatcher.grammar_from_json_schema({**schema, "x-guidance": options})
        for options in (JSON_OPTIONS, LENIENT)
    )


def call_grammars(calls: Calls) -> tuple[str, ...]:
    """The same for calls that are written as {"name": ..., "arguments": ...}."""
    return tuple(
        LLMatcher.grammar_from_lark(_calls(calls, options)) for options in (JSON_OPTIONS, LENIENT)
    )


def _calls(calls: Calls, options: dict[str, Any]) -> str:
    lines = [_call(i, tool, options) for i, tool in enumerate(calls.tools)]
    _bound("".join(lines), "tools")
    more = f' ("\\n"? {calls.again} call)*' if calls.again else ""
    names = " | ".join(f"call_{i}" for i in range(len(lines)))
    head = [f"start: call{more}", f'call: "\\n"? ({names}) "\\n"? {calls.end}']
    return "\n".join([*head, *lines])


def _call(i: int, tool: Tool, options: dict[str, Any]) -> str:
    parameters = {"type": "object", **tool.parameters, "x-guidance": options}
    opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'call_{i}: {opening} %json {json.dumps(parameters)} "}}"'


def _bound(text: str, param: str) -> None:
    if len(text) > MAX_CHARS:
        raise BadRequest(
            f"{param} has {len(text)} characters; a grammar may have {MAX_CHARS}", param
        )
