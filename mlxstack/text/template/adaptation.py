"""Rewrites a conversation to fit what a chat template supports."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.text.normalize_messages import drop_billing, interrupted

SCHEMA_DEFAULTS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
PROPERTY_DEFAULTS: dict[str, Any] = {"description": ""}
TURN_JOINT = "\n\n"
TOOLS_HEAD = """# Tools

You may call these functions to assist with the query of the user:
<tools>"""
CALL_INSTRUCTION = """For each call write a JSON object with its name and arguments:
<tool_call>
{"name": <name of the function>, "arguments": <object of its arguments>}
</tool_call>"""


class ThoughtField(StrEnum):
    """Field of an assistant turn that holds thoughts for the template."""

    REASONING_CONTENT = "reasoning_content"
    REASONING = "reasoning"
    PART = "part"


class CallText(StrEnum):
    """Place of the text beside a tool call."""

    BESIDE = "beside"
    BEFORE = "before"
    RESULT = "result"


class TemplateCapabilities(Struct, frozen=True):
    """Capabilities of a chat template, found by probing."""

    has_system: bool = True
    has_late_system: bool = True
    """A system message between turns is rendered where it stands."""
    needs_alternation: bool = False
    """Two user turns in a row are refused."""
    takes_user_after_tool: bool = True
    """A user may speak right after a tool."""
    takes_objects: bool = True
    """Arguments of a call may be an object."""
    takes_strings: bool = True
    """Arguments of a call may be a string."""
    needs_short_ids: bool = False
    """Call ids must be nine letters and digits."""
    takes_text_and_thought: bool = True
    """A call may have both beside it."""
    takes_parallel_calls: bool = True
    """All calls of one turn are rendered."""
    takes_orphan_results: bool = True
    """A result needs no call before it."""
    needs_results: bool = False
    """Every call needs a result."""
    needs_tool_list: bool = False
    """No tools are an empty list, not None."""
    takes_tools: bool = True
    """Tools are rendered; otherwise they are written as text."""
    takes_calls: bool = True
    """Calls are rendered; otherwise they are written as text."""
    takes_calls_alone: bool = True
    """Calls are rendered where no tools are."""
    takes_results: bool = True
    """Results are rendered; otherwise they are written as text."""
    needs_user: bool = False
    """Some user must speak."""
    needs_first_user: bool = False
    """A user must speak first."""
    takes_empty_answers: bool = True
    """An assistant turn may be empty."""
    needs_parts: bool = False
    """Texts are lists of parts."""
    call_text: CallText = CallText.BESIDE
    """Place of the text beside a call."""
    thought_field: ThoughtField = ThoughtField.REASONING_CONTENT
    """Field of the thoughts."""
    takes_references: bool = True
    """Parameters may have references and alternatives."""
    shows_references: bool = True
    """Whether the schemas that references name are rendered."""
    schema_keys: frozenset[str] = frozenset()
    """Keys that the parameters of a tool must have."""
    property_keys: frozenset[str] = frozenset()
    """Keys that each of their properties must have."""


def adapt_to_template(
    messages: Iterable[Message], capabilities: TemplateCapabilities, tools: Sequence[Tool] = ()
) -> tuple[Message, ...]:
    """Conversation of paired results, adapted to a template's capabilities.

    Deterministic, and append-only: a message added at the end never changes what the earlier
    ones become, except that it may lengthen the last one. Three exceptions, in templates that
    refuse or drop a part of a turn: an answer moves the texts beside the calls before it
    (where such a template drops the thoughts as well), a late result of a parallel call
    moves to its call, and a call that was never answered gets a result once more is said.
    """
    head, turns = _split_head([_without_billing(message) for message in messages])
    if tools and not capabilities.takes_tools:
        text = tools_text(tools, capabilities)
        head = Message(Role.SYSTEM, TURN_JOINT.join((head.text, text)) if head else text)
    if not capabilities.takes_empty_answers:
        turns = [turn for turn in turns if not _is_empty(turn, capabilities)]
    for is_wanted, rewrite in _rewrites(capabilities, has_tools=bool(tools)):
        if is_wanted:
            turns = rewrite(turns)
    if _lacks_user(turns, capabilities):
        turns = [Message(Role.USER), *turns]
    if head is None:
        return tuple(turns)
    if capabilities.has_system:
        return (head, *turns)
    return tuple(_without_system(head, turns))


def cautious(capabilities: TemplateCapabilities) -> Iterator[TemplateCapabilities]:
    """Capabilities of a template, less and less likely to refuse turns."""
    plain = msgspec.structs.replace(
        capabilities,
        takes_references=False,
        schema_keys=frozenset(SCHEMA_DEFAULTS),
        property_keys=frozenset(PROPERTY_DEFAULTS),
    )
    yield plain
    careful = msgspec.structs.replace(
        plain,
        has_late_system=False,
        needs_alternation=True,
        takes_orphan_results=False,
        takes_parallel_calls=False,
        needs_results=True,
        needs_first_user=True,
        takes_empty_answers=False,
    )
    yield careful
    yield msgspec.structs.replace(careful, takes_user_after_tool=False)
    yield msgspec.structs.replace(careful, takes_calls=False, takes_results=False)


Rewrite = Callable[[Sequence[Message]], list[Message]]


def _rewrites(
    capabilities: TemplateCapabilities, *, has_tools: bool
) -> tuple[tuple[bool, Rewrite], ...]:
    """Rewrites of the turns in order, and the template's need."""
    takes_calls = capabilities.takes_calls and (has_tools or capabilities.takes_calls_alone)
    return (
        (not capabilities.takes_orphan_results, _quote_orphans),
        (capabilities.needs_results, _add_results),
        (not capabilities.has_late_system, _place_reminders),
        (not capabilities.takes_results, _quote_results),
        (not takes_calls, _quote_calls),
        (not capabilities.takes_user_after_tool, _fold_users_into_tools),
        (capabilities.needs_alternation, _merge_turns),
        (not capabilities.takes_text_and_thought, _move_texts),
        (capabilities.call_text is CallText.BEFORE, _separate_texts),
        (capabilities.call_text is CallText.RESULT, _quote_texts),
        (not capabilities.takes_parallel_calls, _separate_calls),
    )


def tools_text(tools: Sequence[Tool], capabilities: TemplateCapabilities) -> str:
    """Tools in the system prompt, for templates without tools."""
    lines = [
        json.dumps({"name": t.name, "description": t.description, "parameters": t.parameters},
                   ensure_ascii=False)
        for t in tools
    ]  # fmt: skip
    ending = CALL_INSTRUCTION
    if capabilities.takes_calls:
        ending = "Write a call in your own format for tool calls."
    return "\n".join([TOOLS_HEAD, *lines, "</tools>", "", ending])


def call_text(call: ToolCall) -> str:
    """Call as parsable text, for a template without tool calls."""
    body = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _is_empty(turn: Message, capabilities: TemplateCapabilities) -> bool:
    if turn.role is not Role.ASSISTANT or turn.tool_calls or turn.text.strip():
        return False
    return not (turn.reasoning and capabilities.thought_field is ThoughtField.PART)


def _lacks_user(turns: Sequence[Message], capabilities: TemplateCapabilities) -> bool:
    if capabilities.needs_first_user:
        return not turns or turns[0].role is not Role.USER
    return capabilities.needs_user and all(turn.role is not Role.USER for turn in turns)


def _without_billing(message: Message) -> Message:
    if message.role is not Role.SYSTEM:
        return message
    text = drop_billing(message.text)
    return message if text == message.text else msgspec.structs.replace(message, text=text)


def _split_head(messages: Sequence[Message]) -> tuple[Message | None, list[Message]]:
    """The leading system messages as one, and the rest."""
    n_head = 0
    while n_head < len(messages) and messages[n_head].role is Role.SYSTEM:
        n_head += 1
    text = TURN_JOINT.join(message.text for message in messages[:n_head] if message.text)
    return (Message(Role.SYSTEM, text) if text else None), list(messages[n_head:])


def _quote_orphans(turns: Sequence[Message]) -> list[Message]:
    """Results that follow no call, as after a compaction, become user turns."""
    quoted: list[Message] = []
    has_call = False
    for turn in turns:
        if turn.role is Role.TOOL and not has_call:
            quoted.append(Message(Role.USER, _quoted("tool-result", turn.text)))
            continue
        if turn.role in (Role.USER, Role.ASSISTANT):
            has_call = bool(turn.tool_calls)
        quoted.append(turn)
    return quoted


def _add_results(turns: Sequence[Message]) -> list[Message]:
    """Add a result for calls without one, as after an interrupt."""
    added: list[Message] = []
    open_calls: list[ToolCall] = []
    for turn in turns:
        if turn.role is Role.TOOL:
            open_calls = [call for call in open_calls if call.id != turn.tool_call_id]
        else:
            added += [interrupted(call) for call in open_calls]
            open_calls = list(turn.tool_calls)
        added.append(turn)
    return added


def _quote_results(turns: Sequence[Message]) -> list[Message]:
    """Results become user turns."""
    quoted: list[Message] = []
    for turn in turns:
        if turn.role is Role.TOOL:
            quoted.append(Message(Role.USER, _quoted("tool_response", turn.text)))
        else:
            quoted.append(turn)
    return quoted


def _quote_calls(turns: Sequence[Message]) -> list[Message]:
    """Calls become text of their turn."""
    quoted: list[Message] = []
    for turn in turns:
        texts = [text for text in (turn.text, *map(call_text, turn.tool_calls)) if text]
        quoted.append(msgspec.structs.replace(turn, text="\n".join(texts), tool_calls=()))
    return quoted


def _separate_texts(turns: Sequence[Message]) -> list[Message]:
    """Move text beside a call into a turn before it."""
    apart: list[Message] = []
    for turn in turns:
        if turn.tool_calls and turn.text:
            apart += [Message(Role.ASSISTANT, turn.text), msgspec.structs.replace(turn, text="")]
        else:
            apart.append(turn)
    return apart


def _quote_texts(turns: Sequence[Message]) -> list[Message]:
    """Quote text beside a call before the call's result."""
    quoted: list[Message] = []
    text_before = ""
    for turn in turns:
        if turn.role is Role.TOOL and text_before:
            text = TURN_JOINT.join((_quoted("assistant-text", text_before), turn.text))
            quoted.append(msgspec.structs.replace(turn, text=text))
        else:
            quoted.append(turn)
        text_before = turn.text if turn.tool_calls else ""
    return quoted


def _quoted(tag: str, text: str) -> str:
    return f"<{tag}>\n{text}\n</{tag}>"


def reminder(text: str) -> str:
    """A system message quoted inside another turn."""
    return _quoted("system-reminder", text)


def _gathered(
    turns: Iterable[Message], follows: Callable[[Message, Message], bool]
) -> list[Message]:
    """Join a turn with its followers, texts included."""
    groups: list[list[Message]] = []
    for turn in turns:
        if groups and follows(groups[-1][0], turn):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [_joined(group) for group in groups]


def _joined(group: Sequence[Message]) -> Message:
    if len(group) == 1:
        return group[0]
    return msgspec.structs.replace(
        group[0],
        text=TURN_JOINT.join(turn.text for turn in group if turn.text),
        tool_calls=tuple(call for turn in group for call in turn.tool_calls),
    )


def _place_reminders(turns: Sequence[Message]) -> list[Message]:
    """Move late system messages into the preceding turn, if possible."""
    reminded = (_reminding(turn) for turn in turns if turn.role is not Role.SYSTEM or turn.text)
    placed = _gathered(
        reminded,
        lambda first, message: message.role is Role.SYSTEM and first.role is not Role.ASSISTANT,
    )
    return [_by_user(turn) for turn in placed]


def _reminding(turn: Message) -> Message:
    if turn.role is Role.SYSTEM:
        return Message(Role.SYSTEM, reminder(turn.text))
    return turn


def _by_user(message: Message) -> Message:
    """A reminder outside of turns as a turn of the user."""
    if message.role is Role.SYSTEM:
        return Message(Role.USER, message.text)
    return message


def _fold_users_into_tools(turns: Sequence[Message]) -> list[Message]:
    return _gathered(
        turns, lambda first, message: first.role is Role.TOOL and message.role is Role.USER
    )


def _merge_turns(turns: Sequence[Message]) -> list[Message]:
    """Join consecutive turns of one speaker; tool results stay apart."""
    mergeable = (Role.USER, Role.ASSISTANT)
    return _gathered(
        turns, lambda first, message: first.role is message.role and message.role in mergeable
    )


def _move_texts(turns: Sequence[Message]) -> list[Message]:
    """Move the text beside a call that has a thought.

    In a running tool loop the text becomes the end of the thought. Once an answer follows, the
    template drops the thoughts before it, so that the text becomes a turn of its own.
    """
    is_answer = [turn.role is Role.ASSISTANT and not turn.tool_calls for turn in turns]
    n_answered = max((index for index, is_one in enumerate(is_answer) if is_one), default=0)
    moved = _separate_texts(turns[:n_answered])
    for turn in turns[n_answered:]:
        if turn.tool_calls and turn.text and turn.reasoning:
            thought = TURN_JOINT.join((turn.reasoning, turn.text))
            moved.append(msgspec.structs.replace(turn, text="", reasoning=thought))
        else:
            moved.append(turn)
    return moved


def _separate_calls(turns: Sequence[Message]) -> list[Message]:
    """One turn per call, each followed by its results."""
    apart: list[Message] = []
    following = list(turns)
    while following:
        turn = following.pop(0)
        if len(turn.tool_calls) < 2:
            apart.append(turn)
            continue
        results = list(takewhile(lambda result: result.role is Role.TOOL, following))
        del following[: len(results)]
        for i, call in enumerate(turn.tool_calls):
            base = turn if i == 0 else Message(Role.ASSISTANT)
            apart.append(msgspec.structs.replace(base, tool_calls=(call,)))
            apart += [result for result in results if result.tool_call_id == call.id]
            results = [result for result in results if result.tool_call_id != call.id]
        apart += results
    return apart


def _without_system(head: Message, turns: Sequence[Message]) -> list[Message]:
    """The system prompt as the beginning of the first user turn."""
    if turns and turns[0].role is Role.USER:
        return [_joined((Message(Role.USER, head.text), turns[0])), *turns[1:]]
    return [Message(Role.USER, head.text), *turns]
