"""Capabilities of a chat template, probed with sentinels in every field.

A capability is taken from its default only where that brings more of the sentinels into the
prompt: what a template refuses, drops or spoils is written in another way. No model is known by
name.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.text.template.adaptation import (
    PROPERTY_DEFAULTS,
    SCHEMA_DEFAULTS,
    CallText,
    TemplateCapabilities,
    ThoughtField,
)

REFUSED = -100
SENTINEL = re.compile(r"sx[a-z]+[0-9]")
# What was printed as Python or JSON prints it, though the template meant to write a text.
SPOILED = re.compile(r"'key': |\\\"key|['\"]type['\"]: ?['\"](?:text|thinking)['\"]")
N_ROUNDS = 2
SENTINEL_OF_USER = "sxuser0"

SYSTEM = Message(Role.SYSTEM, "sxsystem0")
LATE = Message(Role.SYSTEM, "sxlate0")
STRING = {"type": "string", "description": "A text."}
TOOL = Tool("act", "Acts.", {"type": "object", "properties": {"key": STRING}, "required": ["key"]})
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "one": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Either."},
        "two": {"type": ["string", "null"], "description": "Either."},
        "three": {"$ref": "#/$defs/item"},
        "four": {"description": "Any value."},
        "five": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "six": {"enum": ["a", 1]},
        "seven": {"type": "object"},
    },
    "$defs": {"item": {"type": "object", "description": "sxtool1", "properties": {"key": STRING}}},
    "required": ["one"],
}
BARE = {"type": "object", "properties": {"key": {"type": "string"}}}


class TemplateProbe(Struct, frozen=True):
    """Probe conversation; `ordered` sentinels come in order, None for all."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    ordered: tuple[str, ...] | None = None

    @property
    def sentinels(self) -> list[str]:
        """The sentinels of the messages, in their order."""
        return [sentinel for message in self.messages for sentinel in _sentinels(message)]


Render = Callable[[TemplateProbe, TemplateCapabilities], str | None]
"""Rendered probe, adapted to capabilities; None if refused."""


def user(n: int) -> Message:
    """The user turn with sentinel `n`."""
    return Message(Role.USER, f"sxuser{n}")


def answer(n: int, thought: str | None = None) -> Message:
    """The assistant turn with sentinel `n`."""
    return Message(Role.ASSISTANT, f"sxtext{n}", reasoning=thought)


def call(n: int, arguments: Any = None, call_id: str = "") -> ToolCall:
    """The call whose argument holds sentinel `n`."""
    values = {"key": f"sxvalue{n}", "flag": True} if arguments is None else arguments
    return ToolCall(call_id or f"call0000{n}", "act", values)


def calling(*calls: ToolCall, text: str = "", thought: str | None = None) -> Message:
    """An assistant turn of calls."""
    return Message(Role.ASSISTANT, text, reasoning=thought, tool_calls=calls)


def result(n: int, call_id: str = "") -> Message:
    """The result with sentinel `n`."""
    call_id = call_id or f"call0000{n}"
    return Message(Role.TOOL, f"sxresult{n}", tool_call_id=call_id, name="act")


# A template may write no more of a tool than its name, or the keys of its arguments.
SHOWN = Tool("sxtool0", "sxtool0", {"type": "object", "properties": {"sxtool0": STRING}})
CALLED = (calling(call(1)), result(1))
LONG = "call_00000001"
SPOKEN = calling(call(1), text="sxtext1")
# A text beside a call may follow the call, never its result.
TOLD = ("sxtext1", "sxresult1")
THINKING = calling(call(1), text="sxtext1", thought="sxthought1")
PLAIN = TemplateProbe("a user message", (user(0),))
BOTH = calling(call(1), call(2))


def acting(
    name: str, *messages: Message, ordered: tuple[str, ...] | None = None, tool: Tool = TOOL
) -> TemplateProbe:
    """A probe whose conversation has a tool."""
    return TemplateProbe(name, messages, (tool,), ordered)


PROBES: dict[str, tuple[TemplateProbe, ...]] = {
    "needs_tool_list": (PLAIN,),
    "needs_parts": (PLAIN,),
    "has_system": (
        TemplateProbe("a system prompt", (SYSTEM, user(0))),
        acting("a system prompt in a tool loop", SYSTEM, user(0), *CALLED),
    ),
    "needs_user": (
        TemplateProbe("no user message", (SYSTEM,)),
        acting("no user message, with tools", SYSTEM),
    ),
    "needs_alternation": (
        TemplateProbe("two user messages in a row", (user(0), user(1), answer(2))),
        TemplateProbe("two answers in a row", (user(0), answer(1), answer(2), user(3))),
    ),
    "takes_objects": (acting("a call", user(0), *CALLED),),
    "takes_strings": (
        acting("arguments that are no JSON", user(0), calling(call(1, "sxvalue1 {")), result(1)),
    ),
    "needs_short_ids": (
        acting("a long call id", user(0), calling(call(1, None, LONG)), result(1, LONG)),
    ),
    "takes_results": (
        acting("a result", user(0), *CALLED, answer(2)),
        TemplateProbe("a result without tools", (user(0), *CALLED, answer(2), user(3))),
    ),
    "takes_calls": (acting("a call and an answer", user(0), *CALLED, answer(2), user(3)),),
    "takes_calls_alone": (TemplateProbe("calls without tools", (user(0), *CALLED)),),
    "takes_tools": (
        acting("tools", user(0), tool=SHOWN),
        acting("tools beside a system prompt", SYSTEM, user(0), tool=SHOWN),
        acting("tools in a tool loop", user(0), *CALLED, tool=SHOWN),
    ),
    "has_late_system": (
        TemplateProbe("a late system message", (SYSTEM, user(0), LATE, user(1))),
        TemplateProbe(
            "a late system message after an answer", (SYSTEM, user(0), answer(1), LATE, user(2))
        ),
    ),
    "takes_user_after_tool": (acting("a user message after a result", user(0), *CALLED, user(2)),),
    "takes_parallel_calls": (
        acting("parallel calls", user(0), BOTH, result(1), result(2), ordered=()),
        acting(
            "parallel calls of an old turn",
            *(user(0), BOTH, result(1), result(2), answer(3), user(4)),
            ordered=(),
        ),
    ),
    "takes_orphan_results": (
        TemplateProbe("a result without a call", (user(0), result(1), user(2))),
        acting("a result before the user", SYSTEM, result(1), user(2)),
    ),
    "needs_results": (acting("a call without a result", user(0), calling(call(1)), user(2)),),
    "needs_first_user": (
        acting("an answer first", SYSTEM, answer(0), user(1)),
        acting("a call first", SYSTEM, *CALLED, user(2)),
    ),
    "takes_empty_answers": (
        TemplateProbe("an empty answer", (user(0), Message(Role.ASSISTANT), user(1))),
    ),
    "thought_field": (
        acting(
            "a thought in a tool loop",
            *(user(0), calling(call(1), thought="sxthought1"), result(1)),
        ),
    ),
    "call_text": (
        acting("thought, text and call", user(0), THINKING, result(1), ordered=TOLD),
        acting("text beside a call", user(0), SPOKEN, result(1), ordered=TOLD),
        acting(
            "text beside an old call", user(0), SPOKEN, result(1), answer(2), user(3), ordered=TOLD
        ),
    ),
    "schema_keys": tuple(
        acting(f"parameters {bare}", user(0), tool=Tool("act", "Acts.", bare))
        for bare in ({}, {"type": "object"}, {"properties": {"key": STRING}})
    ),
    "property_keys": (
        acting("an argument without a description", user(0), tool=Tool("act", "Acts.", BARE)),
    ),
    "takes_references": (
        acting("parameters with references", user(0), tool=Tool("act", "Acts.", NESTED)),
    ),
}
SIMPLE = (PLAIN, *PROBES["has_system"], *PROBES["takes_calls"])
SIMPLEST: tuple[dict[str, Any], ...] = ({}, {"needs_parts": True}, {"needs_tool_list": True})
# Other ways to write what a template does not take, in the order of preference.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "schema_keys": ({"schema_keys": frozenset(SCHEMA_DEFAULTS)},),
    "property_keys": ({"property_keys": frozenset(PROPERTY_DEFAULTS)},),
    "takes_references": ({"shows_references": False}, {"takes_references": False}),
    "thought_field": tuple(
        {"thought_field": field} for field in (ThoughtField.REASONING, ThoughtField.PART)
    ),
    "call_text": (
        {"takes_text_and_thought": False},
        {"call_text": CallText.BEFORE},
        {"call_text": CallText.BEFORE, "takes_text_and_thought": False},
        {"call_text": CallText.RESULT},
    ),
}


def find_capabilities(render: Render) -> TemplateCapabilities:
    """The capabilities of the template behind `render`.

    One that refuses all simple conversations is not probed further.
    """
    capabilities = TemplateCapabilities()
    simplest = (replace(capabilities, **changes) for changes in SIMPLEST)
    if all(render(probe, tried) is None for tried in simplest for probe in SIMPLE):
        return capabilities
    for _ in range(N_ROUNDS):
        before = capabilities
        for field, probes in PROBES.items():
            default = getattr(TemplateCapabilities(), field)
            changes = OTHERS.get(field, ({field: not default},))
            capabilities = _best(render, capabilities, changes, probes)
        if capabilities == before:
            break
    return capabilities


def losses(render: Render, capabilities: TemplateCapabilities) -> list[str]:
    """Probes that are refused or lose content, thoughts aside."""
    lost = []
    for probe in {probe.name: probe for probes in PROBES.values() for probe in probes}.values():
        text = render(probe, capabilities)
        if text is None:
            lost.append(f"{probe.name}: refused")
        elif missing := [s for s in _wanted(probe) if s not in text and "thought" not in s]:
            lost.append(f"{probe.name}: {', '.join(dict.fromkeys(map(_kind, missing)))} lost")
    return lost


def _best(
    render: Render,
    capabilities: TemplateCapabilities,
    alternatives: Iterable[dict[str, Any]],
    probes: tuple[TemplateProbe, ...],
) -> TemplateCapabilities:
    best = capabilities
    most = sum(_score(render, probe, capabilities) for probe in probes)
    full = sum(_full_score(probe) for probe in probes)
    for changes in alternatives:
        if most == full:
            break
        tried = replace(capabilities, **changes)
        score = sum(_score(render, probe, tried) for probe in probes)
        if score > most:
            best = tried
            most = score
    return best


def _score(render: Render, probe: TemplateProbe, capabilities: TemplateCapabilities) -> int:
    """Two for each sentinel in the prompt, and one for their order."""
    text = render(probe, capabilities)
    if text is None:
        return REFUSED
    present = [sentinel for sentinel in _wanted(probe) if sentinel in text]
    ordered = probe.sentinels if probe.ordered is None else probe.ordered
    places = [text.rfind(sentinel) for sentinel in ordered if sentinel in text]
    spoiled = SPOILED.search(text, max(0, text.find(SENTINEL_OF_USER)))
    return 2 * len(present) + (places == sorted(places)) - 3 * bool(spoiled)


def _full_score(probe: TemplateProbe) -> int:
    return 2 * len(_wanted(probe)) + 1


def _wanted(probe: TemplateProbe) -> list[str]:
    return [*probe.sentinels, *SENTINEL.findall(str([tool.parameters for tool in probe.tools]))]


def _kind(sentinel: str) -> str:
    return sentinel[2:-1].replace("value", "arguments")


def _sentinels(message: Message) -> list[str]:
    texts = [message.reasoning or "", message.text, *(str(c.arguments) for c in message.tool_calls)]
    return [match[0] for text in texts for match in SENTINEL.finditer(text)]
