"""Grammar of one tool call, built from its syntax description."""

import json
import re
from collections.abc import Callable

from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.text.formats.description import (
    ARGUMENTS,
    ID,
    INDEX,
    KEY,
    NAME,
    CallSyntax,
    GemmaBody,
    JsonBody,
    NamedBody,
    PythonBody,
    TaggedBody,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import LarkBuilder
from mlxstack.text.grammar.python_and_gemma_calls import (
    function_gemma_call,
    gemma_call,
    python_call,
)
from mlxstack.text.grammar.tagged_calls import NAMES, TagFormat, tagged

Writer = Callable[[Tool, LarkBuilder], str | None]


class ToolCallFormat(Struct, frozen=True):
    """Writer of one `call`; None for an inexpressible one.

    That one begins as `named`. `opens` and `closes` stand around all calls that share a pair of
    marks, `between` two of them; None: each call has marks of its own.
    """

    call: Writer
    named: str = NAME
    opens: str = ""
    closes: str = ""
    between: str | None = None


def format_of(syntax: CallSyntax) -> ToolCallFormat | None:
    """Grammar of a call syntax; None where only mlx-lm reads it."""
    match syntax.body:
        case JsonBody() as body:
            around = (body.list_opens, body.list_closes, syntax.between) if body.is_list else ()
            return ToolCallFormat(json_call(body.parts), _up_to_name(body.parts), *around)
        case NamedBody() as body:
            return ToolCallFormat(
                json_call((*body.parts, ARGUMENTS), NAMES), _up_to_name(body.parts)
            )
        case TaggedBody() as body:
            return ToolCallFormat(tagged(_tags(syntax, body)), _up_to_name(body.parts))
        case PythonBody() as body:
            around = ("[", "]", ", ") if body.is_list else ("", "", syntax.between)
            return ToolCallFormat(python_call, f"{NAME}(", *around)
        case GemmaBody() as body:
            is_deep = body.quote != "<escape>"
            return ToolCallFormat(gemma_call if is_deep else function_gemma_call, f"call:{NAME}{{")
    return None


def _up_to_name(parts: tuple[str, ...]) -> str:
    """Beginning of a call up to the mark after its name."""
    at = parts.index(NAME) + 1 if NAME in parts else len(parts)
    after = parts[at] if at < len(parts) and parts[at] not in (ARGUMENTS, ID, INDEX) else ""
    mark = first_mark(after) if after[:1] in ("<", "[") else ""
    return "".join(parts[:at]) + (mark if is_mark(mark) else after[:1])


def json_call(parts: tuple[str, ...], names: str = ".+") -> Writer:
    """Writer of calls with literal parts around name and arguments."""

    def call(tool: Tool, builder: LarkBuilder) -> str | None:
        if not re.fullmatch(names, tool.name, re.DOTALL):
            return None
        parameters = {**tool.parameters, "type": "object"}
        arguments = JsonRules(builder, parameters).value(parameters)
        name = json.dumps(tool.name)[1:-1] if names == ".+" else tool.name
        written = [
            arguments if part == ARGUMENTS else builder.call_opening(part, name) for part in parts
        ]
        return " ".join(written)

    return call


def _tags(syntax: CallSyntax, body: TaggedBody) -> TagFormat:
    closing = [one for one in (syntax.closes, syntax.section_closes) if one.strip()]
    marks = (body.value_closes, *(pieces(one)[-1] for one in closing))
    never = (*(first_mark(mark.partition(KEY)[0]) for mark in marks), "<![CDATA[")
    return TagFormat(body, never)
