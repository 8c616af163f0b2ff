"""The input items of a Responses request as the messages that they mean."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import TypeVar

import msgspec
from msgspec import structs

from mlxstack.api.dialects.openai_chat.message_content import (
    read_history,
    read_latest_user,
    read_system,
)
from mlxstack.api.dialects.openai_responses import encrypted_reasoning
from mlxstack.api.dialects.openai_responses.request_schema import (
    CustomCallInput,
    FunctionCallInput,
    Item,
    MessageInput,
    OutputItem,
    ReasoningInput,
    ShellCallItem,
)
from mlxstack.api.dialects.openai_responses.tool_names import INPUT, ToolNames
from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.text.normalize_messages import parse_arguments

T = TypeVar("T")
Reader = Callable[[Item, str, ToolNames], Message]

ROLES = {
    "developer": Role.SYSTEM,
    "system": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
JOINT = "\n\n"


def messages(items: list[Item], box: ToolNames) -> tuple[Message, ...]:
    """The conversation; items of other types are left out. Raises BadRequest with their path.

    What the assistant thought, said and called without anybody in between is one turn.
    """
    last = max((i for i, item in enumerate(items) if _is_asked(item)), default=-1)
    read: list[Message] = []
    for i, item in enumerate(items):
        reader = _new_question if i == last else READERS.get(_type(item, f"input[{i}]"))
        if reader is not None:
            read.append(reader(item, f"input[{i}]", box))
    return tuple(_turns(read))


def _type(item: Item, at: str) -> str:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise BadRequest(f"{at}.type must name the type of the item", f"{at}.type")
    return kind


def _is_asked(item: Item) -> bool:
    return item.get("type") in (None, "message") and item.get("role") == "user"


def _as(kind: type[T], item: Item, at: str) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{at}: {error}", at) from None


def _new_question(item: Item, at: str, _: ToolNames) -> Message:
    content = _as(MessageInput, item, at).content
    return Message(Role.USER, read_latest_user(content, f"{at}.content"))


def _message(item: Item, at: str, _: ToolNames) -> Message:
    sent = _as(MessageInput, item, at)
    role = ROLES.get(sent.role)
    if role is None:
        raise BadRequest(f"{at}.role is {sent.role!r}; known are {', '.join(ROLES)}", f"{at}.role")
    read = read_system if role is Role.SYSTEM else read_history
    return Message(role, read(sent.content, f"{at}.content"))


def _reasoning(item: Item, at: str, _: ToolNames) -> Message:
    sent = _as(ReasoningInput, item, at)
    content: list[str | Item] = [*(sent.content or ())]
    thoughts = read_history(content, f"{at}.content") or encrypted_reasoning.decode(
        sent.encrypted_content
    )
    return Message(Role.ASSISTANT, reasoning=thoughts or None)


def _function_call(item: Item, at: str, box: ToolNames) -> Message:
    sent = _as(FunctionCallInput, item, at)
    name = box.spoken(sent.name, sent.namespace)
    return _calling(ToolCall(sent.call_id, name, parse_arguments(sent.arguments)))


def _custom_call(item: Item, at: str, box: ToolNames) -> Message:
    sent = _as(CustomCallInput, item, at)
    name = box.spoken(sent.name, sent.namespace)
    return _calling(ToolCall(sent.call_id, name, {INPUT: sent.input}))


def _shell_call(item: Item, at: str, _: ToolNames) -> Message:
    sent = _as(ShellCallItem, item, at)
    return _calling(ToolCall(_call_id(sent), "local_shell", sent.action))


def _output(item: Item, at: str, _: ToolNames) -> Message:
    sent = _as(OutputItem, item, at)
    return Message(
        Role.TOOL, read_history(sent.output, f"{at}.output"), tool_call_id=_call_id(sent)
    )


def _call_id(sent: ShellCallItem | OutputItem) -> str:
    return sent.call_id or sent.id or f"call_{uuid.uuid4().hex[:24]}"


def _calling(call: ToolCall) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(call,))


READERS: dict[str, Reader] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
}


def _turns(read: list[Message]) -> Iterator[Message]:
    """Neighbours of the assistant as one; thoughts that led to nothing are left out."""
    for is_assistant, neighbours in groupby(read, lambda one: one.role is Role.ASSISTANT):
        if not is_assistant:
            yield from neighbours
        elif (turn := _joined(list(neighbours))).text or turn.tool_calls:
            yield turn


def _joined(parts: Sequence[Message]) -> Message:
    return structs.replace(
        parts[0],
        text=JOINT.join(one.text for one in parts if one.text),
        reasoning=JOINT.join(one.reasoning for one in parts if one.reasoning) or None,
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in parts)),
    )
