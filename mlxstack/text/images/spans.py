"""Marks of images in messages, placeholders in renderings, and ranges in prompts."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.core.image import (
    MARK,
    MARK_CLOSES,
    MARK_OPENS,
    MEDIA_MARKER,
    ImagePart,
    ImageProcessor,
    digest,
    marks,
    virtual_ids,
)
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.text.images.bounds import RefusedImage, upright_size
from mlxstack.text.tokens.cached_tokenizer import Splice

_JOINED = re.compile(f"\n?({MARK.pattern})\n?")


def unmarked(text: str) -> str:
    """The text without marks, as people read it."""
    if MARK_OPENS in text:
        return MARK.sub("[image]", text)
    return text


def without_images(messages: Iterable[Message], note: str, *roles: Role) -> tuple[Message, ...]:
    """Messages with `note` in place of each image of these roles."""
    return tuple(
        structs.replace(one, text=MARK.sub(note, one.text), images=())
        if one.images and one.role in roles
        else one
        for one in messages
    )


def with_own_marks(conversation: Conversation) -> Conversation:
    """Conversation whose texts hold only marks of their images."""
    messages = tuple(map(_with_own_marks, conversation.messages))
    return structs.replace(conversation, messages=messages)


def _with_own_marks(message: Message) -> Message:
    if MARK_OPENS not in message.text and MARK_CLOSES not in message.text:
        return message
    own = [image.mark for image in message.images]
    if marks(message.text) == own and message.text.count(MARK_OPENS) == len(own):
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


def moved_from_tools(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Images of tool results in user messages after the results.

    For templates whose tool role takes no images.
    """
    moved: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message.role is not Role.TOOL:
            moved += waiting
            waiting = []
        if message.role is Role.TOOL and message.images:
            shown = [f"image of tool result {message.tool_call_id or ''}".rstrip()]
            shown += [image.mark for image in message.images]
            waiting.append(Message(Role.USER, "\n".join(shown), images=message.images))
            text = MARK.sub("[image: see below]", message.text)
            message = structs.replace(message, text=text, images=())  # noqa: PLW2901
        moved.append(message)
    return (*moved, *waiting)


def images_of(messages: Iterable[Message]) -> dict[str, ImagePart]:
    """Images by their marks."""
    return {image.mark: image for message in messages for image in message.images}


def image_splices(
    processor: ImageProcessor,
    images: Sequence[ImagePart],
    marked: str,
    token_of: Callable[[str], int],
) -> list[Splice]:
    """Tokens of images for the placeholders of a rendering, in order.

    Raises BadRequest when the template shows another number.
    """
    starts = [match.start() for match in re.finditer(re.escape(processor.placeholder), marked)]
    if len(starts) != len(images):
        raise BadRequest(
            f"messages: the chat template of this model shows {len(starts)} of {len(images)} "
            "images; send images in messages of the user",
            "messages",
        )
    return [
        _splice(processor, image, start, token_of)
        for image, start in zip(images, starts, strict=True)
    ]


def _splice(
    processor: ImageProcessor, image: ImagePart, start: int, token_of: Callable[[str], int]
) -> Splice:
    try:
        width, height = upright_size(image.data)
    except RefusedImage as refusal:
        raise BadRequest(f"messages: an image is refused: {refusal}", "messages") from None
    size = processor.size(width, height, image.detail)
    name = digest(image.data, processor.fingerprint, size)
    virtual = iter(virtual_ids(name, size.n_features))
    tokens = tuple(
        next(virtual) if text is None else token_of(text) for text in processor.expand(size)
    )
    span = ImageSpan(0, len(tokens), name, size, image.data)
    return Splice(start, start + len(processor.placeholder), tokens, span)


def check_media(text: str, images: Sequence[ImagePart]) -> None:
    """Raise BadRequest unless the text has a media marker for each image."""
    n_markers = text.count(MEDIA_MARKER)
    if n_markers != len(images):
        raise BadRequest(
            f"prompt: prompt_string has {n_markers} markers {MEDIA_MARKER}, multimodal_data has "
            f"{len(images)} images; write one marker for each",
            "prompt",
        )
