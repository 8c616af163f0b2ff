"""The grammar of a tool call that must be made."""

from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.lark_builder import LarkBuilder
from mlxstack.text.grammar.response_format import JSON_OPTIONS, LENIENT, bound
from mlxstack.text.grammar.tool_call_formats import ToolCallFormat


class CallDelimiters(Struct, frozen=True):
    """How one model calls tools: what opens and closes a call, and the form of what is between.

    `special` are the tokens without text of their own, by name.
    """

    opens: str
    closes: str
    form: ToolCallFormat
    special: Mapping[str, int]


class ForcedCalls(Struct, frozen=True):
    """Calls of these tools, after the mark that opens the first one; just one if `is_single`."""

    tools: tuple[Tool, ...]
    marks: CallDelimiters
    is_single: bool


def call_grammars(calls: ForcedCalls) -> tuple[str, ...]:
    """The grammar, and another that leaves out what cannot be enforced.

    A tool that the model has no words for is left out; raises BadRequest if that is every one.
    """
    return tuple(_grammar(calls, options) for options in (JSON_OPTIONS, LENIENT))


def _grammar(calls: ForcedCalls, options: Mapping[str, Any]) -> str:
    builder = LarkBuilder(calls.marks.special, options)
    found = [calls.marks.form.call(tool, builder) for tool in calls.tools]
    known = [builder.rule(one) for one in found if one is not None]
    if not known:
        raise _unspeakable(calls.tools)
    grammar = builder.grammar(_start(calls, builder.rule(" | ".join(known)), builder))
    bound(grammar, "tools")
    return LLMatcher.grammar_from_lark(grammar)


def _start(calls: ForcedCalls, call: str, builder: LarkBuilder) -> str:
    marks, form = calls.marks, calls.marks.form
    line = '"\\n"?' if marks.closes else ""
    some = call
    if form.between is not None and not calls.is_single:
        some = f"{call} ({builder.literal(form.between)} {call})*"
    inside = f"{builder.literal(form.opens)} {some} {builder.literal(form.closes)}"
    whole = builder.rule(f"{line} {inside} {line} {builder.literal(marks.closes)}")
    if calls.is_single or form.between is not None or form.is_last:
        return whole
    return f"{whole} ({line} {builder.literal(marks.opens)} {whole})*"


def _unspeakable(tools: Iterable[Tool]) -> BadRequest:
    names = ", ".join(tool.name for tool in tools)
    return BadRequest(
        f"tool_choice: the way this model writes calls has no words for the names or the required "
        f'arguments of {names}, so that a call cannot be forced; use tool_choice "auto"',
        "tool_choice",
    )
