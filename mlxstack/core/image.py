"""Images of a conversation: parts and sizes.

Each feature of an image is a virtual token id. No vocabulary reaches 2^30, and the model is never
given such an id.
"""

from typing import Any

from msgspec import Struct

FIRST_VIRTUAL = 1 << 30
"""Smallest virtual token id."""
MEDIA_MARKER = "<__media__>"
"""Place of an image in a raw text."""


class ImagePart(Struct, frozen=True):
    """Image of a message."""

    data: bytes
    """Encoded bytes as sent."""
    detail: str = "auto"
    """Requested size: "auto", "low", "high" or "original"."""


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
