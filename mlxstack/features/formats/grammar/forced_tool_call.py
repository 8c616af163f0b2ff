"""Grammar of tool calls after the text that opens the first one."""

from collections.abc import Iterable, Mapping

from llguidance import LLMatcher
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar.constrain import call_rule
from mlxstack.features.formats.syntax import CallSyntax
from mlxstack.text.grammar.lark_builder import LarkBuilder
from mlxstack.text.grammar.schema_grammar import bound


class CallDelimiters(Struct, frozen=True):
    """Tool call syntax of a model, with its `forced` opening text."""

    syntax: CallSyntax
    forced: str
    special: Mapping[str, int]
    """Tokens without text of their own, by name."""

    head: str = ""
    """Header of a message that holds the call."""

    is_last: bool = False


class ForcedCalls(Struct, frozen=True):
    """Calls of these tools after the first mark; one if `is_single`.

    `is_complete`: no tool is left out. The grammar ends after the name of a tool that the format
    has no words for, and what follows is free.
    """

    tools: tuple[Tool, ...]
    marks: CallDelimiters
    is_single: bool
    is_complete: bool = False


class CallGrammar(Struct, frozen=True):
    """Grammar for llguidance, with the schema keywords that it leaves out."""

    text: str
    unenforced: frozenset[str] = frozenset()


def call_grammar(calls: ForcedCalls) -> CallGrammar:
    """The grammar of these calls.

    A tool that the format has no words for is left out; raises BadRequest if that is every one.
    """
    builder = LarkBuilder(calls.marks.special)
    syntax = _after_forced(calls.marks)
    rules = [(tool, call_rule(syntax, tool, builder)) for tool in calls.tools]
    written = [(tool, builder.rule(rule)) for tool, rule in rules if rule is not None]
    if not written:
        raise _unspeakable(calls.tools)
    inexpressible = [tool for tool, rule in rules if rule is None] if calls.is_complete else []
    opening = syntax.body.up_to_name
    free = builder.either(builder.call_opening(opening, tool.name) for tool in inexpressible)
    if calls.marks.head:
        start = _headed(calls, written, builder)
    else:
        start = _start(calls, builder.rule(" | ".join(rule for _, rule in written)), free, builder)
    grammar = builder.grammar(start)
    bound(grammar, "tools")
    return CallGrammar(LLMatcher.grammar_from_lark(grammar), frozenset(builder.unenforced))


def _after_forced(marks: CallDelimiters) -> CallSyntax:
    """Syntax of an unmarked call whose body begins with forced text."""
    body = marks.syntax.body
    if not (marks.syntax.is_bare and body.is_object):
        return marks.syntax
    parts = (body.parts[0].removeprefix(marks.forced), *body.parts[1:])
    return replace(marks.syntax, body=replace(body, parts=parts))


def _headed(calls: ForcedCalls, written: list[tuple[Tool, str]], builder: LarkBuilder) -> str:
    """One call in a message whose header names the tool too."""
    syntax = calls.marks.syntax
    head = calls.marks.head.removeprefix(calls.marks.forced)
    opens = f"{head}{syntax.section_opens}{syntax.opens}"
    closes = builder.literal(f"{syntax.closes}{syntax.section_closes}")
    forms = [f"{builder.call_opening(opens, tool.name)} {rule} {closes}" for tool, rule in written]
    return builder.rule(" | ".join(forms))


def _start(calls: ForcedCalls, call: str, free: str, builder: LarkBuilder) -> str:
    """Calls after the forced text, or up to a `free` name.

    A call without marks comes alone.
    """
    syntax = calls.marks.syntax
    ending = builder.literal("" if calls.marks.is_last else syntax.closes)
    whole = f"{syntax.section_opens}{syntax.opens}".lstrip()
    head = builder.call_opening(whole.removeprefix(calls.marks.forced), "")
    last = builder.literal(syntax.section_closes)
    before = ""
    more = ""
    if syntax.body.brackets is not None:
        opens, closes = syntax.body.brackets
        before = builder.literal(opens)
        ending = f"{builder.literal(closes)} {ending}"
        more = builder.literal(syntax.between)
    elif not syntax.is_bare and not calls.marks.is_last:
        more = f"{ending} {builder.literal(f'{syntax.between}{syntax.opens}')}"
    is_row = bool(more) and not calls.is_single
    more_calls = ""
    if is_row:
        more_calls = f"({more} {call})*"
    start = f"{head} {before} {call} {more_calls} {ending} {last}"
    if not free:
        return start
    ways = [start, f"{head} {before} {free}"]
    if is_row:
        ways.append(f"{head} {before} {call} {more_calls} {more} {free}")
    return " | ".join(ways)


def _unspeakable(tools: Iterable[Tool]) -> BadRequest:
    names = ", ".join(tool.name for tool in tools)
    return BadRequest(
        f"tool_choice: the way this model writes calls has no words for the names or the required "
        f'arguments of {names}, so that a call cannot be forced; use tool_choice "auto"',
        "tool_choice",
    )
