"""Messages as histories store them: in the form of OpenAI's chat messages."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Damaged, Unsupported
from mlxstack.core.image import ImagePart
from mlxstack.store.agent_history import image_of
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import MAX_IN_ALL, ImageReader
from mlxstack.text.normalize_messages import parse_arguments, plain_text

MessageReader = Callable[[str, ImageReader], tuple[Message, ...]]
"""Reads a JSON list of messages in the form of the API; raises BadRequest and MsgspecError."""


class StoredFunction(Struct):
    """Function of a stored call; `arguments` are JSON or plain text."""

    name: str
    arguments: str = ""


class StoredCall(Struct):
    """Tool call of a stored message."""

    id: str
    function: StoredFunction


class StoredMessage(Struct):
    """One message, as `write_message` writes it."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[StoredCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


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
        message = msgspec.convert(stored, StoredMessage)
        parts = message.content if isinstance(message.content, list) else [message.content or ""]
        images: list[ImagePart] = []
        texts: list[str] = []
        reader = StoredImageReader(load)
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "image_url":
                images.append(reader.new(part, "messages"))
                texts.append(mark_of(images[-1]))
            else:
                texts.append(plain_text([part]))
    except (msgspec.ValidationError, BadRequest, Unsupported, TypeError) as error:
        raise Damaged(f"a stored message cannot be read: {error}") from None
    return Message(
        role=message.role,
        text="".join(texts),
        reasoning=message.reasoning_content,
        tool_calls=tuple(map(_read_call, message.tool_calls)),
        tool_call_id=message.tool_call_id,
        name=message.name,
        images=tuple(images),
    )


def _read_call(call: StoredCall) -> ToolCall:
    return ToolCall(call.id, call.function.name, parse_arguments(call.function.arguments))


def data_url(image: ImagePart) -> str:
    """Address that holds an image itself."""
    return f"data:image;base64,{base64.b64encode(image.data).decode()}"


def write_message(
    message: Message, url_of: Callable[[ImagePart], str] = data_url
) -> dict[str, Any]:
    """One message as an object; empty fields are left out.

    `url_of` gives the addresses of its images.
    """
    written: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.images:
        written["content"] = _parts(message, url_of)
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [write_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def write_call(call: ToolCall) -> dict[str, Any]:
    """Call of a message as an object."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _parts(message: Message, url_of: Callable[[ImagePart], str]) -> list[dict[str, Any]]:
    """Parts of a content: texts, and the addresses of images."""
    parts: list[dict[str, Any]] = []
    text = message.text
    for image in message.images:
        before, _, text = text.partition(mark_of(image))
        if before:
            parts.append({"type": "text", "text": before})
        image_url = {"url": url_of(image), "detail": image.detail}
        parts.append({"type": "image_url", "image_url": image_url})
    if text:
        parts.append({"type": "text", "text": text})
    return parts
