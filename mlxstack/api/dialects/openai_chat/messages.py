"""OpenAI's chat messages, as clients send them."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.api.custom_tools import call_arguments
from mlxstack.api.request_fields import part_json, read_known
from mlxstack.api.sdk_parts import MEDIA_TYPES, plain_part
from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.core.image import ImagePart
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import KINDS, TEXT_ONLY, ImageReader
from mlxstack.text.normalize_messages import (
    TEXT_PARTS,
    error_text,
    parse_arguments,
    plain_text,
    system_text,
)

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}

NOTES = {
    "image": "[image omitted]",
    "image_url": "[image omitted]",
    "input_image": "[image omitted]",
    "input_audio": "[audio omitted]",
    "file": "[file omitted]",
    "input_file": "[file omitted]",
    "encrypted_content": "[encrypted content omitted]",
}
"""Replacements of other kinds of parts where they can no longer be refused."""

WITH_IMAGES = frozenset({"user", "tool", "function"})
"""Roles whose images are read."""
PARTS = (*TEXT_PARTS, *KINDS, *NOTES, "refusal")
"""Kinds of the parts of a content."""
CALL = "tool_use"
RESULT = "tool_result"
THOUGHTS = ("thinking", "reasoning", "redacted_thinking", "redacted-reasoning")
"""Kinds of parts that are messages of their own, or reasoning."""
TEXTS = frozenset({"text", "content"})
"""Fields of a part with its text."""
BARE = frozenset({"type", "cache_control"})
"""Fields of a part that says nothing."""

Content = str | list[str | dict[str, Any]] | None
AnyContent = str | list[Any] | dict[str, Any] | int | float | bool | None
"""Content of a tool result, which some clients send as any JSON."""
ContentReader = Callable[[AnyContent, str], str]


class FunctionParam(Struct):
    """Function of a call in the history; `arguments` usually are a string.

    Some clients write Anthropic's `input` in their place.
    """

    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None
    input: dict[str, Any] | None = None


class CustomParam(Struct):
    """Custom tool of a call in the history."""

    name: str = ""
    input: str = ""


class ToolCallParam(Struct):
    """A call that the assistant made earlier.

    Some clients write the fields of `function` beside the id; LangChain has `args` then.
    """

    id: str | None = None
    function: FunctionParam | None = None
    custom: CustomParam | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None
    args: dict[str, Any] | None = None


class ChatMessageParam(Struct):
    """One message of a chat.

    `function` is the legacy role of `tool`, `function_call` its one call.

    A last one with `prefix` is continued, as DeepSeek and Mistral do, or with `partial`, as
    Moonshot and Qwen's cloud do. LiteLLM has its reasoning in `thinking_blocks`, OpenRouter in
    `reasoning_details`, others in objects. A refusal stands for a content.
    """

    role: str = ""
    content: AnyContent = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: FunctionParam | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prefix: bool | None = None
    partial: bool | None = None
    refusal: Any = None
    type: Any = None
    """Type of an item of the Responses API, which some clients send among messages."""
    parts: Any = None
    tool_invocations: Any = msgspec.field(default=None, name="toolInvocations")
    """With `parts`, a message as the Vercel AI SDK shows it, which is refused."""


def read_messages(
    messages: Sequence[ChatMessageParam],
    images: ImageReader = TEXT_ONLY,
    custom_names: frozenset[str] = frozenset(),
) -> tuple[Message, ...]:
    """Messages of a request. Raises BadRequest with the path of the field.

    Only the latest message of the user can be refused for not being text, and for its images only
    if no answer follows: a client may send a refused message again, before another.
    """
    turns = [
        (f"messages[{i}]", turn)
        for i, message in enumerate(messages)
        for turn in spread_message(message)
    ]
    last = max((n for n, (_, turn) in enumerate(turns) if turn.role == "user"), default=-1)
    answered = max((n for n, (_, turn) in enumerate(turns) if turn.role == "assistant"), default=-1)
    read = []
    for n, (path, turn) in enumerate(turns):
        reader = TEXT_ONLY
        if turn.role in WITH_IMAGES:
            reader = images
        content = turn.content
        if ROLES.get(turn.role) is Role.TOOL:
            content = result_content(content)
        is_new = n == last > answered
        content, image_parts = with_marks(content, f"{path}.content", reader, is_new=is_new)
        message = _message(turn, content, path, read_latest_user if n == last else read_history)
        if image_parts:
            message = msgspec.structs.replace(message, images=image_parts)
        if turn.tool_calls and custom_names:
            calls = tuple(read_call(call, custom_names) for call in turn.tool_calls)
            message = msgspec.structs.replace(message, tool_calls=calls)
        read.append(message)
    return tuple(read)


def read_message_file(text: str, images: ImageReader) -> tuple[Message, ...]:
    """Messages of a JSON list.

    Raises BadRequest, and MsgspecError for another form.
    """
    return read_messages(msgspec.json.decode(text, type=list[ChatMessageParam]), images)


def spread_message(message: ChatMessageParam) -> Iterator[ChatMessageParam]:
    """Messages of one whose parts may be calls, results and reasoning.

    Cursor writes them so, in Anthropic's form, the Vercel AI SDK in its own, and Mistral its
    reasoning. Results of a user come before the text; those of the assistant keep their places.
    """
    if not isinstance(message.content, list) or not message.content:
        yield _said(message, message.content)
        return
    parts = [plain_part(part) if _is_of_sdk(part) else part for part in message.content]
    if message.role != "assistant":
        yield from map(_result, filter(_is_result, parts))
        parts = [part for part in parts if not _is_result(part)]
    for is_result, group in groupby(parts, _is_result):
        if is_result:
            yield from map(_result, group)
            continue
        said = _said(message, list(group))
        message = ChatMessageParam(message.role)
        if said.content or said.tool_calls or said.function_call or said.reasoning_content:
            yield said


def has_inner_messages(content: Any) -> bool:
    """Whether parts of a content are calls, results or reasoning."""
    return isinstance(content, list) and any(
        _is_of_sdk(part) or _is_result(part) or _kind(part) in (CALL, *THOUGHTS) for part in content
    )


def _is_of_sdk(part: Any) -> bool:
    """Whether the Vercel AI SDK alone writes a part so."""
    match _kind(part):
        case "tool-call" | "tool-result":
            return True
        case "image":
            return "image" in part
        case "file":
            return any(name in part for name in MEDIA_TYPES)
    return False


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _is_result(part: Any) -> bool:
    return _kind(part) == RESULT and isinstance(part.get("tool_use_id"), str)


def _result(part: dict[str, Any]) -> ChatMessageParam:
    content = part.get("content")
    if part.get("is_error"):
        content = error_text(read_history(result_content(content), "content"))
    name = part.get("name")
    return ChatMessageParam(
        "tool",
        content,
        tool_call_id=part["tool_use_id"],
        name=name if isinstance(name, str) else None,
    )


def _said(message: ChatMessageParam, content: AnyContent) -> ChatMessageParam:
    """Message with the calls and reasoning of its content."""
    calls = list(message.tool_calls or ())
    ids = {call.id for call in calls if call.id}
    thoughts: list[Any] = []
    for field in (message.thinking_blocks, message.reasoning_details):
        thoughts = thoughts or (list(field) if isinstance(field, list) else [])
    if isinstance(content, list) and message.role == "assistant":
        # LangChain has the same call in both places.
        calls += [call for call in map(_call, content) if call and call.id not in ids]
        thoughts += [part for part in content if _kind(part) in THOUGHTS]
        content = [part for part in content if not (_kind(part) in THOUGHTS or _call(part))]
    fields = (message.reasoning_content, message.reasoning, thoughts)
    reasoning = next(filter(None, map(_thought, fields)), None)
    return msgspec.structs.replace(
        message, content=content, tool_calls=calls, reasoning_content=reasoning
    )


def _call(part: Any) -> ToolCallParam | None:
    """Call in a part of the assistant."""
    match part:
        case {"type": "tool_use", "name": str(name)}:
            return ToolCallParam(str(part.get("id") or ""), FunctionParam(name, part.get("input")))
    return None


def _thought(value: Any) -> str:
    """Text of reasoning in any form."""
    match value:
        case str():
            return value
        case list():
            return "\n".join(filter(None, map(_thought, value)))
        case dict():
            names = ("thinking", "text", "summary", "content")
            return next(filter(None, (_thought(value.get(name)) for name in names)), "")
    return ""


def with_marks(
    content: Any, path: str, images: ImageReader, *, is_new: bool
) -> tuple[Any, tuple[ImagePart, ...]]:
    """Content with marks in place of images, and the images.

    Raises BadRequest for a new image that is refused; earlier ones become notes.
    """
    if not images.accepts_images or not isinstance(content, list):
        return content, ()
    parts: list[str | dict[str, Any]] = []
    image_parts: list[ImagePart] = []
    for i, part in enumerate(_checked(content, path) or ()):
        if not isinstance(part, dict) or part.get("type", "text") not in KINDS:
            parts.append(part)
            continue
        image = images.new(part, f"{path}[{i}]") if is_new else images.earlier(part)
        text = image
        if isinstance(image, ImagePart):
            image_parts.append(image)
            text = mark_of(image)
        parts.append({"type": "text", "text": text})
    return parts, tuple(image_parts)


def read_latest_user(content: AnyContent, path: str, joint: str = "\n") -> str:
    """Text of the latest user message or a predicted answer.

    Parts of a message are lines. Raises BadRequest for other kinds.
    """
    try:
        return plain_text(_checked(content, path), joint)
    except Unsupported as error:
        raise BadRequest(error.message, path) from None


def read_history(content: AnyContent, path: str) -> str:
    """Text of an earlier message or tool result; other kinds become notes."""
    return plain_text(_readable(_checked(content, path)), "\n")


def result_content(content: AnyContent, kinds: Sequence[str] = PARTS) -> Content:
    """Content of a tool result: text, parts, or else JSON text.

    Parts of unknown types may be among known ones.
    """
    match content:
        case str() | None:
            return content
        case list() if any(map(_text_fault, content)):
            pass
        case [_, *_] if all(_is_part(part, kinds) for part in content):
            return content
        case list() if all(map(_is_typed, content)) and any(
            _is_part(part, kinds) for part in content
        ):
            return content
    return json.dumps(content, ensure_ascii=False)


def _is_part(part: Any, kinds: Sequence[str]) -> bool:
    if isinstance(part, dict):
        kind = part.get("type", "text" if "text" in part else None)
        # The files of a folder have this type, too.
        return kind in kinds and (kind != "file" or "file" in part)
    return isinstance(part, str)


def _is_typed(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def read_system(content: AnyContent, path: str) -> str:
    """Text of a system prompt, whose parts follow without a line break."""
    return system_text(_readable(_checked(content, path)))


def _checked(content: AnyContent, path: str) -> Content:
    if not isinstance(content, str | list | None):
        raise BadRequest(f"{path}: Expected `str | array | null`, got {content!r:.20}", path)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        part_path = f"{path}[{i}]"
        kind: Any = part
        if isinstance(part, dict):
            kind = part.get("type", "text" if TEXTS & part.keys() else None)
            if fault := _text_fault(part):
                raise BadRequest(f"{part_path}.text{fault}", f"{part_path}.text")
            part_path += ".type"
        if not isinstance(kind, str):
            raise BadRequest(f"{part_path} must be a string", part_path)
    return content


def _text_fault(part: Any) -> str:
    """Fault of a part without its text, else ""."""
    kind = _kind(part)
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return ""
    text = part.get("text")
    if not TEXTS & part.keys() and part.keys() - BARE:
        return ": Field required"
    if isinstance(text, list) or (isinstance(text, dict) and "value" not in text):
        return " must be a string"
    return ""


def _readable(content: Content) -> Content:
    if not isinstance(content, list):
        return content
    return [part for part in map(_noted, content) if part != ""]


def _noted(part: str | dict[str, Any]) -> str | dict[str, Any]:
    try:
        plain_text([part])
    except Unsupported:
        assert isinstance(part, dict)
        text = part.get("text")
        if part["type"] in NOTES:
            return NOTES[part["type"]]
        return text if isinstance(text, str) else part_json(part)
    return part


def _message(
    turn: ChatMessageParam, content: AnyContent, path: str, read_text: ContentReader
) -> Message:
    if not turn.role:
        raise BadRequest(f"{path}.role: Field required", f"{path}.role")
    role = read_known(ROLES, turn.role, f"{path}.role")
    _require_content(turn, path)
    calls = turn.tool_calls
    if not calls and turn.function_call and turn.function_call.name:
        calls = [ToolCallParam(function=turn.function_call)]
    if content is None and isinstance(turn.refusal, str):
        content = turn.refusal
    if role is Role.SYSTEM:
        read_text = read_system
    return Message(
        role=role,
        text=read_text(content, f"{path}.content"),
        reasoning=turn.reasoning_content,
        tool_calls=tuple(map(read_call, calls or ())),
        tool_call_id=turn.tool_call_id,
        name=turn.name,
    )


def _require_content(message: ChatMessageParam, path: str) -> None:
    """Raise BadRequest for what is said in fields of a user interface."""
    foreign = {"toolInvocations": message.tool_invocations}
    if not (message.content or message.tool_calls):
        foreign["parts"] = message.parts
    for name, value in foreign.items():
        if value:
            reason = "is a field of a user interface; send content and tool_calls"
            raise BadRequest(f"{path}.{name} {reason}", f"{path}.{name}")


def read_call(call: ToolCallParam, custom_names: frozenset[str] = frozenset()) -> ToolCall:
    """Call of a history; custom tools may have their input alone."""
    if call.custom is not None:
        return ToolCall(call.id or "", call.custom.name, {"input": call.custom.input})
    function = call.function or FunctionParam(call.name, call.arguments, call.args)
    arguments = function.input if function.arguments is None else function.arguments
    read = call_arguments if function.name in custom_names else parse_arguments
    return ToolCall(id=call.id or "", name=function.name or "", arguments=read(arguments))
