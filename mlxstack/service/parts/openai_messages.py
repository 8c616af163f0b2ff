"""OpenAI's chat messages: how clients send them, and how histories store them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Damaged, Unsupported
from mlxstack.core.response_parts import ContentPart, ReasoningPart, SpokenPart, ToolCallPart
from mlxstack.text.normalize_messages import parse_arguments, plain_text, system_text

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}

# Replacements of other kinds of parts where they can no longer be refused.
NOTES = {
    "image": "[image omitted]",
    "image_url": "[image omitted]",
    "input_image": "[image omitted]",
    "input_audio": "[audio omitted]",
    "file": "[file omitted]",
    "input_file": "[file omitted]",
    "encrypted_content": "[encrypted content omitted]",
}

Content = str | list[str | dict[str, Any]] | None
ContentReader = Callable[[Content, str], str]


class FunctionParam(Struct):
    """Function of a call in the history; `arguments` usually are a string."""

    name: str = ""
    arguments: str | dict[str, Any] | None = None


class CustomParam(Struct):
    """Custom tool of a call in the history."""

    name: str = ""
    input: str = ""


class ToolCallParam(Struct):
    """A call that the assistant made earlier."""

    id: str | None = None
    function: FunctionParam | None = None
    custom: CustomParam | None = None


class ChatMessageParam(Struct):
    """One message. `function` is the legacy role of `tool`, `function_call` its one call."""

    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: FunctionParam | None = None
    tool_call_id: str | None = None
    name: str | None = None


def read_messages(sent: Sequence[ChatMessageParam]) -> tuple[Message, ...]:
    """Messages of a request. Raises BadRequest with the path of the field.

    Only the latest message of the user can be refused for not being text.
    """
    last = max((i for i, message in enumerate(sent) if message.role == "user"), default=-1)
    return tuple(
        _message(message, f"messages[{i}]", read_latest_user if i == last else read_history)
        for i, message in enumerate(sent)
    )


def read_stored(stored: Mapping[str, Any]) -> Message:
    """Read what `write_message` wrote, its texts unchanged. Raises Damaged."""
    try:
        return _message(msgspec.convert(stored, ChatMessageParam), "messages", _text, _text)
    except (msgspec.ValidationError, BadRequest) as error:
        raise Damaged(f"a stored message cannot be read: {error}") from None


def write_message(message: Message) -> dict[str, Any]:
    """One message as an object; empty fields are left out."""
    written: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [_write_call(call) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            written[key] = value
    return written


def assistant_message(spoken: Iterable[SpokenPart]) -> Message:
    """The parts of a reply as a message, without cut calls."""
    parts = tuple(spoken)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = (part for part in parts if isinstance(part, ToolCallPart) and not part.is_cut)
    return Message(
        role=Role.ASSISTANT,
        text="".join(part.text for part in parts if isinstance(part, ContentPart)),
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls),
    )


def read_latest_user(content: Content, at: str) -> str:
    """Text of the latest user message, one line per part.

    Raises BadRequest for other kinds.
    """
    try:
        return plain_text(_checked(content, at), "\n")
    except Unsupported as error:
        raise BadRequest(error.message, at) from None


def read_prediction(content: Content, at: str) -> str:
    """Text of a predicted answer, whose parts follow each other. Raises BadRequest."""
    try:
        return plain_text(_checked(content, at))
    except Unsupported as error:
        raise BadRequest(error.message, at) from None


def read_history(content: Content, at: str) -> str:
    """Text of an earlier message or tool result; other kinds become notes."""
    return plain_text(_readable(_checked(content, at)), "\n")


def read_system(content: Content, at: str) -> str:
    """Text of a system prompt, whose parts follow without a line break."""
    return system_text(_readable(_checked(content, at)))


def _text(content: Content, at: str) -> str:
    return plain_text(_checked(content, at))


def _checked(content: Content, at: str) -> Content:
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and not isinstance(part.get("type", "text"), str):
            raise BadRequest(f"{at}[{i}].type must be a string", f"{at}[{i}].type")
    return content


def _readable(content: Content) -> Content:
    return [_noted(part) for part in content] if isinstance(content, list) else content


def _noted(part: str | dict[str, Any]) -> str | dict[str, Any]:
    try:
        plain_text([part])
    except Unsupported:
        assert isinstance(part, dict)
        return NOTES.get(part["type"], "")
    return part


def _message(
    sent: ChatMessageParam,
    at: str,
    read: ContentReader,
    read_rules: ContentReader = read_system,
) -> Message:
    role = ROLES.get(sent.role)
    if role is None:
        raise BadRequest(f"{at}.role is {sent.role!r}; known are {', '.join(ROLES)}", f"{at}.role")
    calls = sent.tool_calls or (
        [ToolCallParam(function=sent.function_call)] if sent.function_call else []
    )
    return Message(
        role=role,
        text=(read_rules if role is Role.SYSTEM else read)(sent.content, f"{at}.content"),
        reasoning=sent.reasoning if sent.reasoning_content is None else sent.reasoning_content,
        tool_calls=tuple(_read_call(call) for call in calls),
        tool_call_id=sent.tool_call_id,
        name=sent.name,
    )


def _read_call(call: ToolCallParam) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.id or "", call.custom.name, {"input": call.custom.input})
    function = call.function or FunctionParam()
    return ToolCall(
        id=call.id or "",
        name=function.name,
        arguments=parse_arguments(function.arguments),
    )


def _write_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
