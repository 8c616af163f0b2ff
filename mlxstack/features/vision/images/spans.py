"""Images in renderings: placeholders, virtual token ids and ranges.

The id of a feature is `2^30 | 30 bits of SHA-256(digest, index)`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from mlxstack.core.conversation import Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.core.image import FIRST_VIRTUAL, MEDIA_MARKER, ImagePart, ImageSize
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.text.images.bounds import RefusedImage, upright_size
from mlxstack.text.images.marks import MARK, mark_of
from mlxstack.text.tokens.cached_tokenizer import Splice

_BITS = FIRST_VIRTUAL - 1
_PER_HASH = 8


def without_images(messages: Iterable[Message], note: str, *roles: Role) -> tuple[Message, ...]:
    """Messages with `note` in place of each image of these roles."""
    noted: list[Message] = []
    for message in messages:
        if message.images and message.role in roles:
            text = MARK.sub(note, message.text)
            noted.append(structs.replace(message, text=text, images=()))
        else:
            noted.append(message)
    return tuple(noted)


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
            lines = [f"image of tool result {message.tool_call_id or ''}".rstrip()]
            lines += [mark_of(image) for image in message.images]
            waiting.append(Message(Role.USER, "\n".join(lines), images=message.images))
            text = MARK.sub("[image: see below]", message.text)
            message = structs.replace(message, text=text, images=())  # noqa: PLW2901
        moved.append(message)
    return (*moved, *waiting)


def images_of(messages: Iterable[Message]) -> dict[str, ImagePart]:
    """Images by their marks."""
    return {mark_of(image): image for message in messages for image in message.images}


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


def digest(data: bytes, fingerprint: str, size: ImageSize) -> bytes:
    """SHA-256 of encoded bytes, the processor's fingerprint and the resized size.

    Without the size, an image in two sizes would share the ids of its first features.
    """
    hashed = hashlib.sha256(f"{fingerprint} {size.width}x{size.height}".encode())
    hashed.update(hashlib.sha256(data).digest())
    return hashed.digest()


def virtual_ids(image: bytes, n: int) -> list[int]:
    """Virtual token ids of the `n` features of an image."""
    ids: list[int] = []
    for block in range(-(-n // _PER_HASH)):
        hashed = hashlib.sha256(image + block.to_bytes(4, "little")).digest()
        words = (int.from_bytes(hashed[i : i + 4], "little") for i in range(0, 32, 4))
        ids += [FIRST_VIRTUAL | (word & _BITS) for word in words]
    return ids[:n]
