"""Marks of images in the texts of messages, which no client sees."""

import hashlib
import re
from typing import Any

from msgspec import structs

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.image import ImagePart

MARK_OPENS = "\ufdd5"
"""Begins the mark of an image: a noncharacter of Unicode."""
MARK_CLOSES = "\ufdd6"
MARK = re.compile(f"{MARK_OPENS}[0-9a-f]{{32}}{MARK_CLOSES}")
_JOINED = re.compile(f"\n?({MARK.pattern})\n?")


def mark_of(image: ImagePart) -> str:
    """Text at the place of an image; equal images have equal ones."""
    hashed = hashlib.sha256(hashlib.sha256(image.data).digest() + image.detail.encode())
    return f"{MARK_OPENS}{hashed.hexdigest()[:32]}{MARK_CLOSES}"


def marks_in(text: str) -> list[str]:
    """Marks of images in the text of a message, in order."""
    return MARK.findall(text) if MARK_OPENS in text else []


def unmarked(text: str) -> str:
    """The text without marks, as people read it."""
    if MARK_OPENS in text:
        return MARK.sub("[image]", text)
    return text


def with_own_marks(conversation: Conversation) -> Conversation:
    """Conversation whose texts hold only marks of their images."""
    messages = tuple(map(_with_own_marks, conversation.messages))
    return structs.replace(conversation, messages=messages)


def _with_own_marks(message: Message) -> Message:
    if MARK_OPENS not in message.text and MARK_CLOSES not in message.text:
        return message
    own = [mark_of(image) for image in message.images]
    if marks_in(message.text) == own and message.text.count(MARK_OPENS) == len(own):
        return message
    text = message.text.replace(MARK_OPENS, "").replace(MARK_CLOSES, "")
    return structs.replace(message, text=text, images=())


def content_parts(text: str) -> list[dict[str, Any]]:
    """Content of a message for its template: texts and images in order."""
    parts: list[dict[str, Any]] = []
    for piece in _JOINED.split(text):
        if MARK.fullmatch(piece):
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
