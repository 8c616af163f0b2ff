"""Tokens of a prompt together with the ranges of its images."""

from collections.abc import Sequence
from typing import Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.image import FIRST_VIRTUAL, ImageRange, ImageSpan, reuse_cut


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
