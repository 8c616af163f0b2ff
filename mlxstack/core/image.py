"""Images of a conversation: parts, marks, sizes, token ids and processor.

Each feature of an image is a virtual token id, `2^30 | 30 bits of SHA-256(digest, index)`. No
vocabulary reaches 2^30, and the model is never given such an id.
"""

import hashlib
import re
from typing import Any, Protocol

from msgspec import Struct

FIRST_VIRTUAL = 1 << 30
"""Smallest virtual token id."""
_BITS = FIRST_VIRTUAL - 1
_PER_HASH = 8

MARK_OPENS = "\ufdd5"
"""Begins the mark of an image: a noncharacter of Unicode."""
MARK_CLOSES = "\ufdd6"
MEDIA_MARKER = "<__media__>"
MARK = re.compile(f"{MARK_OPENS}[0-9a-f]{{32}}{MARK_CLOSES}")


class ImagePart(Struct, frozen=True):
    """Image of a message: encoded bytes as sent, and wished size."""

    data: bytes
    detail: str = "auto"

    @property
    def mark(self) -> str:
        """Private text at the place of the image in a message.

        Equal images have equal marks.
        """
        hashed = hashlib.sha256(hashlib.sha256(self.data).digest() + self.detail.encode())
        return f"{MARK_OPENS}{hashed.hexdigest()[:32]}{MARK_CLOSES}"


class MediaText(Struct, frozen=True):
    """Raw text with Base64 images at its media markers."""

    text: str
    data: tuple[Any, ...]


class ImageSize(Struct, frozen=True):
    """Pixels of an image after resizing, and its grid of features."""

    width: int
    height: int
    rows: int
    columns: int

    @property
    def n_features(self) -> int:
        """Features of the image, and virtual tokens of its range."""
        return self.rows * self.columns


class ImageProcessor(Protocol):
    """Image processing of a family of models, without MLX."""

    @property
    def placeholder(self) -> str:
        """Text of the token in place of a feature."""

    @property
    def written(self) -> str:
        """Text that the chat template writes for one image.

        It is replaced by `framed` where it differs.
        """

    @property
    def framed(self) -> str:
        """The placeholder within the text that surrounds it in a chat."""

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """Size after resizing of an image of `width` x `height` pixels, upright."""

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """Replacement of the placeholder: texts of special tokens, None for each feature."""

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Input of the tower (float32 numpy) of an upright RGB image."""


def marks(text: str) -> list[str]:
    """Marks of images in the text of a message, in order."""
    return MARK.findall(text) if MARK_OPENS in text else []


def digest(data: bytes, fingerprint: str, size: ImageSize) -> bytes:
    """SHA-256 of encoded bytes, the processor's fingerprint and the resized size.

    Without the size, an image in two sizes would share the ids of its first features.
    """
    whole = hashlib.sha256(f"{fingerprint} {size.width}x{size.height}".encode())
    whole.update(hashlib.sha256(data).digest())
    return whole.digest()


def virtual_ids(image: bytes, n: int) -> list[int]:
    """Virtual token ids of the `n` features of an image."""
    ids: list[int] = []
    for block in range(-(-n // _PER_HASH)):
        hashed = hashlib.sha256(image + block.to_bytes(4, "little")).digest()
        words = (int.from_bytes(hashed[i : i + 4], "little") for i in range(0, 32, 4))
        ids += [FIRST_VIRTUAL | (word & _BITS) for word in words]
    return ids[:n]
