"""Tokens of a prompt together with the ranges of its images.

The virtual ids of an image have too few bits to tell images apart: block hashes
and comparisons of tokens look at the digests of the ranges too.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.image import FIRST_VIRTUAL, ImageSize


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


class TokenRow(Protocol):
    """Tokens and ascending ranges of images, to hash and to compare."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids, virtual ones in the ranges of images."""

    @property
    def images(self) -> Sequence[ImageRange]:
        """Ranges of the images that begin within the tokens."""


class KeptTokens(Struct, frozen=True):
    """Tokens whose KV is kept, with the images that begin there."""

    tokens: Sequence[int]
    images: tuple[ImageRange, ...] = ()


class PromptTokens(Struct, frozen=True):
    """Tokens of a prompt, its images, and positions worth a checkpoint.

    Images and positions are ascending. Raises ValueError for a virtual id outside of all images:
    the model has no row for it.
    """

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    checkpoint_positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_images(self.tokens, self.images)

    def extended(self, tokens: tuple[int, ...]) -> Self:
        """The prompt with more tokens of text."""
        return replace(self, tokens=self.tokens + tokens)

    def first(self, n_tokens: int) -> "PromptTokens":
        """The first tokens; fewer where an image would be cut."""
        end = reuse_cut(self.images, min(n_tokens, len(self.tokens)))
        return PromptTokens(
            self.tokens[:end],
            tuple(image for image in self.images if image.end <= end),
            tuple(position for position in self.checkpoint_positions if position < end),
        )


def kept(row: TokenRow, start: int, end: int) -> KeptTokens:
    """Tokens `[start, end)` of a row, with its images that begin there."""
    images = (image for image in row.images if start <= image.start < end)
    ranges = tuple(ImageRange(image.start, image.end, image.digest) for image in images)
    return KeptTokens(row.tokens[start:end], ranges)


def check_images(tokens: Sequence[int], images: Sequence[ImageRange]) -> None:
    """Raise ValueError for a virtual id outside of all ascending ranges. O(tokens)."""
    start = 0
    for image in images:
        _check_text(tokens, start, image.start)
        start = image.end
    _check_text(tokens, start, len(tokens))


def _check_text(tokens: Sequence[int], start: int, end: int) -> None:
    if max(tokens[start:end], default=0) >= FIRST_VIRTUAL:
        raise ValueError(f"a token of [{start}, {end}) belongs to an image that is not here")


def n_computed(images: Iterable[ImageSpan], n_cached: int) -> int:
    """Number of images that do not lie within the first `n_cached` tokens."""
    return sum(image.end > n_cached for image in images)


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
