"""Vision tower, and stepwise encoding of one image."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from msgspec import Struct

from mlxstack.core.image import ImageSize

FUSED_HEADS = (64, 80, 128)
"""Sizes of a head for which MLX's attention keeps no scores in memory."""
MAX_QUERIES = 4096
"""Queries of one attention; more are computed in slices."""
SLICE = 1024


class Features(Struct, frozen=True):
    """Features of an image.

    `embeddings` (n, dim) stand in place of those of its tokens. `deepstack[i]` (n, dim) is added to
    the hidden states after layer i of the text model.
    """

    embeddings: mx.array
    deepstack: tuple[mx.array, ...] = ()

    def part(self, first: int, last: int) -> "Features":
        """Features `[first, last)`."""
        deepstack = tuple(level[first:last] for level in self.deepstack)
        return Features(self.embeddings[first:last], deepstack)

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.embeddings.nbytes + sum(level.nbytes for level in self.deepstack)


class VisionTower(nn.Module):  # type: ignore[misc]
    """Tower of one checkpoint; families implement `steps`, `enter`, `leave`."""

    fingerprint: str = ""

    @property
    def steps(self) -> list[Any]:
        """Blocks in order."""
        raise NotImplementedError

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Hidden states before the first block, and a second input of all."""
        raise NotImplementedError

    def tap(self, index: int, hidden: mx.array) -> mx.array | None:
        """Deepstack features after a block, if any."""
        return None

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Embeddings (n, dim) of the hidden states after the last block."""
        raise NotImplementedError

    @property
    def n_blocks(self) -> int:
        """Blocks that an encoding goes through."""
        return len(self.steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    def begin(self, pixels: Any, size: ImageSize) -> "Encoding":
        """Encoding of an image from the pixels of the family's processor."""
        return Encoding(self, pixels, size)


class Encoding:
    """One image on its way through a tower."""

    features: Features | None = None
    """Evaluated features, once `advance` has said True."""

    def __init__(self, tower: VisionTower, pixels: Any, size: ImageSize) -> None:
        self._tower, self._size = tower, size
        self._hidden, self._beside = tower.enter(mx.array(pixels), size)
        self._taps: list[mx.array] = []
        self._n_done = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the hidden states and features so far."""
        return self._hidden.nbytes + sum(tapped.nbytes for tapped in self._taps)

    def advance(self, n_blocks: int) -> bool:
        """Evaluate the next `n_blocks` blocks; True when the features are complete."""
        last = min(self._n_done + n_blocks, self._tower.n_blocks)
        for index in range(self._n_done, last):
            self._hidden = self._tower.steps[index](self._hidden, self._beside)
            if (tapped := self._tower.tap(index, self._hidden)) is not None:
                self._taps.append(tapped)
        self._n_done = last
        if last < self._tower.n_blocks:
            mx.eval(self._hidden, self._taps)
            return False
        embeddings = self._tower.leave(self._hidden, self._size)
        mx.eval(embeddings, self._taps)
        self.features = Features(embeddings, tuple(self._taps))
        return True


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Attention of all to all, (1, heads, n, dim) each."""
    dim, n = q.shape[-1], q.shape[2]
    more = next((fused for fused in FUSED_HEADS if fused >= dim), dim) - dim
    if more:
        wider = [(0, 0)] * 3 + [(0, more)]
        q, k, v = mx.pad(q, wider), mx.pad(k, wider), mx.pad(v, wider)
    step = n if n <= MAX_QUERIES else SLICE
    parts = [
        mx.fast.scaled_dot_product_attention(q[:, :, i : i + step], k, v, scale=scale)
        for i in range(0, n, step)
    ]
    return mx.concatenate(parts, axis=2)[..., :dim]


def rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotary embedding of two halves, in the precision of the angles."""
    half = x.shape[-1] // 2
    turned = mx.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return (x * cos + turned * sin).astype(x.dtype)


def patch_matrix(weight: mx.array, n_channels: int) -> mx.array:
    """Patch convolution as a matrix over (channels, ..., rows, columns).

    PyTorch has the channels second, MLX has them last.
    """
    is_last = weight.shape[-1] == n_channels
    return (mx.moveaxis(weight, -1, 1) if is_last else weight).flatten(1)
