"""OpenAI's chat messages: how clients send them, and how histories store them."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Damaged, Unsupported
from mlxstack.core.image import ImagePart
from mlxstack.core.response_parts import ContentPart, ReasoningPart, SpokenPart, ToolCallPart
from mlxstack.store.agent_history import image_of
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import KINDS, MAX_IN_ALL, TEXT_ONLY, ImageReader
from mlxstack.text.normalize_messages import TEXT_PARTS, parse_arguments, plain_text, system_text

T = TypeVar("T")

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

WITH_IMAGES = frozenset({"user", "tool", "function"})
"""Roles whose images are read."""
PARTS = (*TEXT_PARTS, *KINDS, *NOTES, "refusal")
"""Kinds of the parts of a content."""

Content = str | list[str | dict[str, Any]] | None
AnyContent = str | list[Any] | dict[str, Any] | int | float | bool | None
"""Content of a tool result, which some clients send as any JSON."""
ContentReader = Callable[[AnyContent, str], str]


class FunctionParam(Struct):
    """Function of a call in the history; `arguments` usually are a string."""

    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None


class CustomParam(Struct):
    """Custom tool of a call in the history."""

    name: str = ""
    input: str = ""


class ToolCallParam(Struct):
    """A call that the assistant made earlier.

    Some clients write the fields of `function` beside the id.
    """

    id: str | None = None
    function: FunctionParam | None = None
    custom: CustomParam | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None


class ChatMessageParam(Struct):
    """One message. `function` is the legacy role of `tool`, `function_call` its one call.

    A last one with `prefix` is continued, as DeepSeek and Mistral do. LiteLLM has its reasoning in
    `thinking_blocks`, OpenRouter in `reasoning_details`.
    """

    role: str
    content: AnyContent = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: list[Any] | None = None
    reasoning_details: list[Any] | None = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: FunctionParam | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prefix: bool | None = None


def read_messages(
    sent: Sequence[ChatMessageParam], images: ImageReader = TEXT_ONLY
) -> tuple[Message, ...]:
    """Messages of a request. Raises BadRequest with the path of the field.

    Only the latest message of the user can be refused for not being text, and for its images only
    if no answer follows: a client may send a refused message again, before another.
    """
    said = [(f"messages[{i}]", item) for i, one in enumerate(sent) for item in _turns(one)]
    last = max((n for n, (_, item) in enumerate(said) if item.role == "user"), default=-1)
    answered = max((n for n, (_, item) in enumerate(said) if item.role == "assistant"), default=-1)
    read = []
    for n, (at, item) in enumerate(said):
        seen = images if item.role in WITH_IMAGES else TEXT_ONLY
        is_result = ROLES.get(item.role) is Role.TOOL
        content = result_content(item.content) if is_result else item.content
        content, found_images = with_marks(
            content, f"{at}.content", seen, is_new=n == last > answered
        )
        one = _message(item, content, at, read_latest_user if n == last else read_history)
        read.append(msgspec.structs.replace(one, images=found_images) if found_images else one)
    return tuple(read)


def _turns(message: ChatMessageParam) -> Iterator[ChatMessageParam]:
    """Turns of a message, whose parts may be calls, results and reasoning.

    Cursor writes them so, in Anthropic's form, and Mistral its reasoning.
    """
    parts: list[Any] = message.content if isinstance(message.content, list) else []
    calls = list(message.tool_calls or ())
    thoughts = [*(message.thinking_blocks or message.reasoning_details or ())]
    rest: list[str | dict[str, Any]] = []
    for part in parts:
        match part:
            case {"type": "tool_use", "name": str(name)} if message.role == "assistant":
                function = FunctionParam(name, part.get("input"))
                calls.append(ToolCallParam(str(part.get("id") or ""), function))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                yield ChatMessageParam("tool", part.get("content"), tool_call_id=call_id)
            case {"type": "thinking" | "reasoning"} if message.role == "assistant":
                thoughts.append(part)
            case _:
                rest.append(part)
    told = message.reasoning_content or message.reasoning or _thoughts(thoughts)
    if len(rest) < len(parts):
        message = msgspec.structs.replace(message, content=rest, tool_calls=calls)
    if rest or calls or not parts:
        yield msgspec.structs.replace(message, reasoning_content=told)


def _thoughts(parts: Iterable[Any]) -> str | None:
    """Text of parts of reasoning; sealed ones have none."""
    known = [part for part in parts if isinstance(part, dict)]
    texts = [part.get("thinking") or part.get("text") or part.get("summary") for part in known]
    return "\n".join(plain_text(text, "\n") for text in texts if text) or None


def with_marks(
    content: Any, at: str, images: ImageReader, *, is_new: bool
) -> tuple[Any, tuple[ImagePart, ...]]:
    """Content with marks in place of images, and the images.

    Raises BadRequest for a new image that is refused; earlier ones become notes.
    """
    if not images.accepts_images or not isinstance(content, list):
        return content, ()
    parts: list[str | dict[str, Any]] = []
    found_images: list[ImagePart] = []
    for i, part in enumerate(_checked(content, at) or ()):
        if not isinstance(part, dict) or part.get("type", "text") not in KINDS:
            parts.append(part)
            continue
        found = images.new(part, f"{at}[{i}]") if is_new else images.earlier(part)
        if isinstance(found, ImagePart):
            found_images.append(found)
            found = mark_of(found)
        parts.append({"type": "text", "text": found})
    return parts, tuple(found_images)


class StoredImageReader(ImageReader):
    """Images of stored messages; `load` reads those beside a history."""

    def __init__(self, load: Callable[[str], bytes] | None) -> None:
        super().__init__(accepts_images=True, most_new=MAX_IN_ALL)
        self._load = load

    def new(self, part: dict[str, Any], at: str) -> ImagePart:
        """Image of a part. Raises BadRequest, or Damaged for a file."""
        name = image_of(part)
        if name is None or self._load is None:
            return super().new(part, at)
        # It was checked when it was sent.
        return ImagePart(self._load(name), part["image_url"].get("detail", "auto"))


def read_stored(stored: Mapping[str, Any], load: Callable[[str], bytes] | None = None) -> Message:
    """Read what `write_message` wrote, its texts unchanged. Raises Damaged.

    `load` reads an image beside the history.
    """
    try:
        sent = msgspec.convert(stored, ChatMessageParam)
        if isinstance(sent.content, str | None):
            return _message(sent, sent.content, "messages", _text, _text)
        images = StoredImageReader(load)
        content, found_images = with_marks(sent.content, "messages", images, is_new=True)
        message = _message(sent, content, "messages", _text, _text)
        return msgspec.structs.replace(message, images=found_images)
    except (msgspec.ValidationError, BadRequest) as error:
        raise Damaged(f"a stored message cannot be read: {error}") from None


def data_url(image: ImagePart) -> str:
    """Address that holds an image itself."""
    return f"data:image;base64,{base64.b64encode(image.data).decode()}"


def write_message(
    message: Message, url_of: Callable[[ImagePart], str] = data_url
) -> dict[str, Any]:
    """One message as an object; empty fields are left out.

    `url_of` gives the addresses of its images.
    """
    content = _written_content(message, url_of)
    written: dict[str, Any] = {"role": message.role.value, "content": content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [write_call(call) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            written[key] = value
    return written


def _written_content(
    message: Message, url_of: Callable[[ImagePart], str]
) -> str | list[dict[str, Any]]:
    """Text, or its parts with the addresses of images."""
    if not message.images:
        return message.text
    parts: list[dict[str, Any]] = []
    rest = message.text
    for image in message.images:
        before, _, rest = rest.partition(mark_of(image))
        if before:
            parts.append({"type": "text", "text": before})
        image_url = {"url": url_of(image), "detail": image.detail}
        parts.append({"type": "image_url", "image_url": image_url})
    return [*parts, *([{"type": "text", "text": rest}] if rest else [])]


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


def read_latest_user(content: AnyContent, at: str, joint: str = "\n") -> str:
    """Text of the latest user message or a predicted answer.

    Parts of a message are lines. Raises BadRequest for other kinds.
    """
    try:
        return plain_text(_checked(content, at), joint)
    except Unsupported as error:
        raise BadRequest(error.message, at) from None


def read_history(content: AnyContent, at: str) -> str:
    """Text of an earlier message or tool result; other kinds become notes."""
    return plain_text(_readable(_checked(content, at)), "\n")


def result_content(content: AnyContent, kinds: Sequence[str] = PARTS) -> Content:
    """Content of a tool result: text, parts, or else JSON text.

    Parts of unknown types may be among known ones.
    """
    match content:
        case str() | None:
            return content
        case [_, *_] if all(_is_part(part, kinds) for part in content):
            return content
        case list() if all(map(_is_typed, content)) and any(_is_part(x, kinds) for x in content):
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


def read_system(content: AnyContent, at: str) -> str:
    """Text of a system prompt, whose parts follow without a line break."""
    return system_text(_readable(_checked(content, at)))


def _text(content: AnyContent, at: str) -> str:
    return plain_text(_checked(content, at))


def _checked(content: AnyContent, at: str) -> Content:
    if not isinstance(content, str | list | None):
        raise BadRequest(f"{at}: Expected `str | array | null`, got {content!r:.20}", at)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if not isinstance(kind, str):
            path = f"{at}[{i}]" + (".type" if isinstance(part, dict) else "")
            raise BadRequest(f"{path} must be a string", path)
    return content


def _readable(content: Content) -> Content:
    if not isinstance(content, list):
        return content
    return [shown for part in content if (shown := _noted(part)) != ""]


def _noted(part: str | dict[str, Any]) -> str | dict[str, Any]:
    try:
        plain_text([part])
    except Unsupported:
        assert isinstance(part, dict)
        text = part.get("text")
        return NOTES.get(part["type"], text if isinstance(text, str) else "")
    return part


def _message(
    sent: ChatMessageParam,
    content: AnyContent,
    at: str,
    read: ContentReader,
    read_rules: ContentReader = read_system,
) -> Message:
    role = read_known(ROLES, sent.role, f"{at}.role")
    calls = sent.tool_calls or (
        [ToolCallParam(function=sent.function_call)] if sent.function_call else []
    )
    return Message(
        role=role,
        text=(read_rules if role is Role.SYSTEM else read)(content, f"{at}.content"),
        reasoning=sent.reasoning if sent.reasoning_content is None else sent.reasoning_content,
        tool_calls=tuple(map(read_call, calls)),
        tool_call_id=sent.tool_call_id,
        name=sent.name,
    )


def read_known(table: Mapping[str, T], name: str, param: str) -> T:
    """Entry of a table by a name that a client sent. Raises BadRequest."""
    if name not in table:
        raise BadRequest(f"{param} is {name!r}; known are {', '.join(table)}", param)
    return table[name]


def read_call(call: ToolCallParam) -> ToolCall:
    """Call of a history."""
    if call.custom is not None:
        return ToolCall(call.id or "", call.custom.name, {"input": call.custom.input})
    function = call.function or FunctionParam(call.name, call.arguments)
    return ToolCall(
        id=call.id or "", name=function.name or "", arguments=parse_arguments(function.arguments)
    )


def write_call(call: ToolCall) -> dict[str, Any]:
    """Call of a message as an object."""
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
