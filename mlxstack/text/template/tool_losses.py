"""Parts of conversations with tools that a chat template loses.

A conversation with a sentinel in each field is rendered as its client wrote it, without the
adaptations of `capabilities`: these may save what is lost, by writing it in another way.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.text.template.capabilities import SPOILED

MARKS = re.compile(r"(?:\s|<[^<>\s]*>|\[[^\[\]\s]*\])*")
"""Marks at the beginning of a text, such as the one of all texts."""
NAMES = ("sxnamea", "sxnameb")
PARAMETERS = {
    "type": "object",
    "description": "sxschema0",
    "properties": {"key": {"type": "string", "description": "sxproperty0"}},
    "required": ["key"],
}
TOOLS = tuple(Tool(name, f"sxabout{name[-1]}", PARAMETERS) for name in NAMES)


class LostPart(StrEnum):
    """Part of a conversation that a prompt lacks or spoils."""

    CONVERSATION = "the whole conversation, which is refused"
    SYSTEM = "the system prompt beside tools"
    TOOLS = "the tools"
    DESCRIPTIONS = "descriptions of tools"
    PARAMETERS = "parameters of tools"
    USER = "messages of the user"
    CALLS = "tool calls"
    ARGUMENTS = "arguments of calls"
    OBJECTS = "arguments of calls as an object: they are written as a quoted text"
    PARALLEL = "all calls of an answer but one"
    RESULTS = "results of calls"
    TEXT = "the text beside a call"
    ANSWERS = "answers"
    ORDER = "the order of the messages"
    ROLES = "the roles: two of them are written alike"
    ENDS = "the ends of answers"
    OPENING = "the beginning of the answer (the generation prompt)"


class RenderedConversation(Struct, frozen=True):
    """Conversation to render; `opens_answer` asks for the generation prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = TOOLS
    opens_answer: bool = False


Render = Callable[[RenderedConversation], str | None]
"""Prompt text; None where the template refuses."""


def call(n: int, name: str) -> ToolCall:
    """Call whose argument holds sentinel `n`."""
    return ToolCall(f"call{n:05}", name, {"key": f"sxvalue{n}"})


def result(n: int) -> Message:
    """Result with sentinel `n` of the call with the same one."""
    return Message(Role.TOOL, f"sxresult{n}", tool_call_id=f"call{n:05}", name=NAMES[n % 2])


SYSTEM = Message(Role.SYSTEM, "sxsystem0")
FIRST = Message(Role.USER, "sxuser0")
SECOND = Message(Role.USER, "sxuser1")
CALLING = Message(Role.ASSISTANT, "sxbeside0", tool_calls=(call(0, NAMES[0]),))
BOTH = Message(Role.ASSISTANT, tool_calls=(call(2, NAMES[0]), call(3, NAMES[1])))
ANSWER = Message(Role.ASSISTANT, "sxtext0")
LOOP = (SYSTEM, FIRST, CALLING, result(0), ANSWER, SECOND)
PARALLEL = (SYSTEM, FIRST, BOTH, result(2), result(3), ANSWER, SECOND)
EXPECTED = (
    (LostPart.SYSTEM, ("sxsystem0",)),
    (LostPart.TOOLS, NAMES),
    (LostPart.DESCRIPTIONS, tuple(tool.description for tool in TOOLS)),
    (LostPart.PARAMETERS, ("sxproperty0",)),
    (LostPart.USER, ("sxuser0", "sxuser1")),
    (LostPart.TEXT, ("sxbeside0",)),
    (LostPart.RESULTS, ("sxresult0",)),
    (LostPart.ANSWERS, ("sxtext0",)),
)
ORDERED = ("sxsystem0", "sxuser0", "sxvalue0", "sxresult0", "sxtext0", "sxuser1")


def tool_losses(render: Render, turn_ends: Sequence[str]) -> tuple[LostPart, ...]:
    """Lost parts; `turn_ends` are the texts that end an answer."""
    text = render(RenderedConversation(LOOP))
    if text is None:
        return (LostPart.CONVERSATION,)
    lost = [part for part, sentinels in EXPECTED if any(word not in text for word in sentinels)]
    if text.count(NAMES[0]) < 2 and LostPart.TOOLS not in lost:
        lost.append(LostPart.CALLS)
    elif "sxvalue0" not in text:
        lost.append(LostPart.CALLS if LostPart.TOOLS in lost else LostPart.ARGUMENTS)
    elif SPOILED.search(text, text.find("sxuser0")):
        lost.append(LostPart.OBJECTS)
    places = [text.rfind(word) for word in ORDERED if word in text]
    if places != sorted(places):
        lost.append(LostPart.ORDER)
    else:
        lost += _lost_marks(text, turn_ends)
    if LostPart.CALLS not in lost and LostPart.ARGUMENTS not in lost:
        lost += _lost_parallel(render)
    lost += _lost_opening(render)
    return tuple(dict.fromkeys(lost))


def _lost_marks(text: str, turn_ends: Sequence[str]) -> list[LostPart]:
    """Roles and ends of the turns, by the texts between sentinels."""
    lost = []
    answer = _between(text, "sxresult0", "sxtext0")
    user = _between(text, "sxtext0", "sxuser1")
    if answer is not None and user is not None:
        if _role_mark(answer) == _role_mark(user):
            lost.append(LostPart.ROLES)
        ends = [end for end in turn_ends if not _opens(text, end)]
        if ends and not any(end in user for end in ends):
            lost.append(LostPart.ENDS)
    return lost


def _opens(text: str, mark: str) -> bool:
    """Whether a mark opens turns: conversations begin with it.

    Where a template writes no ends, the opening of the next turn follows an answer.
    """
    before, found, _ = text.partition(mark)
    return bool(found) and MARKS.fullmatch(before) is not None


def _lost_parallel(render: Render) -> list[LostPart]:
    text = render(RenderedConversation(PARALLEL))
    if text is None or any(f"sxvalue{n}" not in text for n in (2, 3)):
        return [LostPart.PARALLEL]
    if any(f"sxresult{n}" not in text for n in (2, 3)):
        return [LostPart.RESULTS]
    if text.find("sxresult2") > text.find("sxresult3"):
        return [LostPart.ORDER]
    return []


def _lost_opening(render: Render) -> list[LostPart]:
    """The opening, if prompts have none and rendered answers do."""
    for messages in ((SYSTEM, FIRST), (SYSTEM, FIRST, CALLING, result(0))):
        opened = render(RenderedConversation(messages, opens_answer=True))
        closed = render(RenderedConversation(messages))
        answered = render(RenderedConversation((*messages, ANSWER)))
        if opened is None or closed is None or answered is None or opened != closed:
            continue
        head = answered[: max(0, answered.find("sxtext0"))]
        if len(head.rstrip()) > len(opened.rstrip()):
            return [LostPart.OPENING]
    return []


def _between(text: str, first: str, second: str) -> str | None:
    """Text between two sentinels; None where they do not follow each other."""
    start = text.rfind(first)
    end = text.rfind(second)
    if 0 <= start < end:
        return text[start + len(first) : end]
    return None


def _role_mark(text: str) -> str:
    """Last characters before a message: the mark of its role."""
    return " ".join(text.split())[-24:]
