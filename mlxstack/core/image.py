"""Images of a conversation, and their ranges in a tokenized prompt.

Each feature of an image is a virtual token id, `2^30 | 30 bits of SHA-256(digest, index)`. No
vocabulary reaches 2^30, and the model is never given such an id. 30 bits are too few to tell images
apart: block hashes and comparisons of tokens look at the digests of the ranges too.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

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


class ImageRange(Struct, frozen=True):
    """Range `[start, end)` of tokens with an image's features.

    Tokens of the model's own, such as the ends of rows, may stand between virtual ones. `digest`
    identifies encoded bytes, size, parameters of the processor and weights of the tower.
    """

    start: int
    end: int
    digest: bytes


class ImageSpan(ImageRange, frozen=True):
    """Range of a prompt with its image: size and encoded bytes."""

    size: ImageSize
    data: bytes = b""

    def moved(self, n_tokens: int) -> "ImageSpan":
        """The span after `n_tokens` more tokens."""
        return replace(self, start=self.start + n_tokens, end=self.end + n_tokens)


def n_computed(images: Iterable[ImageSpan], n_cached: int) -> int:
    """Number of images that do not lie within the first `n_cached` tokens."""
    return sum(image.end > n_cached for image in images)


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


def without_virtual(tokens: Iterable[int], placeholder: int) -> list[int]:
    """Tokens of the vocabulary: `placeholder` in place of each virtual id."""
    return [placeholder if token >= FIRST_VIRTUAL else token for token in tokens]


def text_tokens(tokens: Iterable[int]) -> list[int]:
    """Tokens without virtual ids: text that may be copied, counted or shown."""
    return [token for token in tokens if token < FIRST_VIRTUAL]


def same_until(own: Sequence[ImageRange], other: Sequence[ImageRange], n_tokens: int) -> int:
    """First position of `n_tokens` equal ids that is of different images.

    It is `n_tokens` without one. Both are ascending. An image that begins within the tokens
    differs from none.
    """
    for mine, theirs in zip_longest(own, other):
        start = min(span.start for span in (mine, theirs) if span is not None)
        if start >= n_tokens:
            break
        is_same = (
            mine is not None
            and theirs is not None
            and (mine.start, mine.end, mine.digest) == (theirs.start, theirs.end, theirs.digest)
        )
        if not is_same:
            return start
    return n_tokens


def whole_images(spans: Iterable[ImageRange], start: int, end: int) -> int:
    """End near `end` of a range that cuts no image."""
    cut = next((span for span in spans if span.start < end < span.end), None)
    if cut is None:
        return end
    return cut.start if cut.start > start else cut.end


def reuse_cut(spans: Iterable[ImageRange], n_tokens: int) -> int:
    """Longest prefix of at most `n_tokens` tokens that ends in no image."""
    return next((span.start for span in spans if span.start < n_tokens < span.end), n_tokens)
