"""Normalizes message content, tool calls and results of all API dialects."""

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest, Unsupported

_BILLING = re.compile(
    r"\A\s*x-anthropic-billing-header:(?:[ \t]*[a-z][a-z0-9_-]*=[^;\n]*(?:;|(?=\n)|\Z))*[ \t]*\n?"
)
# Half a character, which JSON can spell and no encoder can write.
_HALF = re.compile(r"[\ud800-\udfff]")
MAX_DEFINED = 2**24
INTERRUPTED = "The call was interrupted; it has no result."
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


def drop_billing(text: str) -> str:
    """`text` without a leading billing header, which differs per conversation or request."""
    return _BILLING.sub("", text, count=1)


def plain_text(content: Any, joint: str = "") -> str:
    """Text of a `content` field: None, string, or text parts.

    Other keys of a part, such as cache_control, are ignored. Raises Unsupported for a part
    that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return joint.join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind == "refusal":
        return str(part.get("refusal") or "")
    if kind in TEXT_PARTS:
        # OpenAI's Assistants have an object with the text, others the text in `content`.
        text = part.get("text")
        if isinstance(text, dict):
            text = text.get("value")
        elif not text and isinstance(part.get("content"), str):
            text = part["content"]
        return str(text or "")
    raise Unsupported(f"{kind} input is not supported by this model; send text", "messages")


def system_text(content: Any) -> str:
    """A system prompt, string or blocks, without billing headers, as one string."""
    blocks = content if isinstance(content, list) else [content]
    return "".join(drop_billing(_part_text(block)) for block in blocks if block is not None)


def parse_arguments(arguments: Any) -> dict[str, Any] | str:
    """Tool call arguments as an ordered object; never fails.

    What is not a JSON object stays a string. Nothing at all means no arguments, and an object may
    be encoded twice. Letters that UTF-8 cannot encode become U+FFFD.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        try:
            return json.dumps(arguments, ensure_ascii=False)
        except TypeError:  # a literal of Python that is no JSON, such as a set
            return str(arguments)
    try:
        parsed = json.loads(arguments.strip() or "null")
        if isinstance(parsed, str):
            parsed = json.loads(parsed)
        parsed = writable({} if parsed is None else parsed)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def writable(value: Any) -> Any:
    """A JSON value with U+FFFD for every lone surrogate, keys included."""
    match value:
        case str():
            return _HALF.sub("\ufffd", value)
        case dict():
            return {writable(key): writable(item) for key, item in value.items()}
        case list():
            return [writable(item) for item in value]
    return value


def error_text(text: str) -> str:
    """Text of a failed tool call; templates have no error field."""
    if text.startswith("Error: "):
        return text
    return f"Error: {text}"


class Definitions:
    """Tools of a request by name, for descriptions in its messages."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._n_left = MAX_DEFINED

    def text(self, names: Iterable[str]) -> str:
        """Definitions, one per line; unknown tools have just a name.

        Raises BadRequest when all that was described comes to more than MAX_DEFINED characters.
        """
        return "\n".join(["<functions>", *map(self._line, names), "</functions>"])

    def _line(self, name: str) -> str:
        tool = self._tools.get(name, Tool(name))
        meant = {"description": tool.description, "name": name, "parameters": tool.parameters}
        line = json.dumps(meant, ensure_ascii=False)
        self._n_left -= len(line)
        if self._n_left < 0:
            raise BadRequest(
                f"messages: the definitions of the tools that they refer to have more than "
                f"{MAX_DEFINED} characters in all; refer to fewer, or to each only once",
                "messages",
            )
        return f"<function>{line}</function>"


def result_text(content: Any, tools: Definitions) -> str:
    """The content of a tool result; `tool_reference` parts become definitions.

    Parts are joined by line breaks. Raises Unsupported for a part that is not text.
    """
    if not isinstance(content, list):
        return plain_text(content)
    names = [part["tool_name"] for part in content if _is_reference(part)]
    texts = [_part_text(part) for part in content if not _is_reference(part)]
    return "\n".join([*texts, tools.text(names)] if names else texts)


def _is_reference(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_reference" and "tool_name" in part


def user_message(results: Iterable[Message], text: str) -> tuple[Message, ...]:
    """Tool results of a user message, in order, then its text."""
    if text:
        return (*results, Message(Role.USER, text))
    return tuple(results)


def split_thoughts(text: str, start: str, end: str) -> tuple[str | None, str]:
    """Split an assistant text into leading reasoning block and answer."""
    opened = text.lstrip()
    if not opened.startswith(start) or end not in opened:
        return None, text
    thoughts, _, answer = opened[len(start) :].partition(end)
    return thoughts.strip("\n"), answer.lstrip("\n")


def removal_note(name: str) -> str:
    """The line that stands for a `tool_removal` block."""
    return f"The tool {name} is no longer available."


def head_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Tools of the prompt's head: those not deferred."""
    return tuple(tool for tool in tools if not tool.is_deferred)


def interrupted(call: ToolCall) -> Message:
    """Result of a call that has none."""
    return Message(Role.TOOL, INTERRUPTED, tool_call_id=call.id, name=call.name)


def pair_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with results in the order of their calls.

    Many templates print no call ids, so that the model reads results in the order of the calls.
    A result belongs to the first open call of its turn with its id; one without an id to the first
    with its name, else to the first. A skipped call gets a result that says so; results without
    a call come last. Calls without an id get one by their position. Results keep the places of
    results, so that texts between them stay. Idempotent, and stable when messages follow.
    """
    paired: list[list[Message]] = []
    names: dict[str, str] = {}
    calls: list[ToolCall] = []
    places: list[int] = []
    n_calls = 0
    before: Role | None = None
    for original in messages:
        message = original
        if message.role is Role.ASSISTANT:
            if before is not Role.ASSISTANT:
                _place(paired, places, calls, names)
                calls = []
                places = []
            message = _with_ids(original, n_calls)
            n_calls += len(message.tool_calls)
            calls += message.tool_calls
            names |= {call.id: call.name for call in message.tool_calls}
        elif message.role is Role.TOOL:
            places.append(len(paired))
        paired.append([message])
        before = message.role
    _place(paired, places, calls, names)
    return tuple(message for group in paired for message in group)


def _with_ids(message: Message, n_before: int) -> Message:
    if all(call.id for call in message.tool_calls):
        return message
    calls = (
        call if call.id else replace(call, id=f"call_{index}")
        for index, call in enumerate(message.tool_calls, n_before)
    )
    return replace(message, tool_calls=tuple(calls))


def _place(
    paired: list[list[Message]],
    places: Sequence[int],
    calls: Sequence[ToolCall],
    names: dict[str, str],
) -> None:
    """Put the results of a turn at `places`, in call order."""
    results = [paired[place][0] for place in places]
    answers = _answers(calls, results)
    answered = set(answers.values())
    groups: list[list[Message]] = [[]]
    for index in range(max(answers, default=-1) + 1):
        if index in answers:
            groups[-1].append(_named(results[answers[index]], calls[index]))
            groups.append([])
        else:
            groups[-1].append(interrupted(calls[index]))
    orphans = [
        [_known(result, names)] for index, result in enumerate(results) if index not in answered
    ]
    for place, group in zip(places, [*groups[:-1], *orphans], strict=True):
        paired[place] = group


def _answers(calls: Sequence[ToolCall], results: Sequence[Message]) -> dict[int, int]:
    """Index of the result of each answered call, by call index."""
    by_id: dict[str, deque[int]] = {}
    by_name: dict[str | None, deque[int]] = {}
    for index, result in enumerate(results):
        if result.tool_call_id:
            by_id.setdefault(result.tool_call_id, deque()).append(index)
        else:
            by_name.setdefault(result.name, deque()).append(index)
    answers: dict[int, int] = {}
    for index, call in enumerate(calls):
        if waiting := by_id.get(call.id):
            answers[index] = waiting.popleft()
    for index, call in enumerate(calls):
        if index not in answers and (waiting := by_name.get(call.name)):
            answers[index] = waiting.popleft()
    unnamed = deque(sorted(index for waiting in by_name.values() for index in waiting))
    for index in range(len(calls)):
        if index not in answers and unnamed:
            answers[index] = unnamed.popleft()
    return answers


def _named(result: Message, call: ToolCall) -> Message:
    return replace(result, tool_call_id=call.id, name=result.name or call.name)


def _known(result: Message, names: dict[str, str]) -> Message:
    """Orphaned result, named after an earlier call with its id."""
    name = result.name or names.get(result.tool_call_id or "")
    return replace(result, name=name)
