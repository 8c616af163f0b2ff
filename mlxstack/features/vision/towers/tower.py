"""Vision tower, and stepwise encoding of one image."""

from collections.abc import Callable, Iterator
from itertools import islice
from math import ceil
from typing import Any

import mlx.core as mx
from mlx import nn
from msgspec import Struct

from mlxstack.core.image import ImageSize
from mlxstack.features.vision.towers.blocks import VisionBlock, patch_matrix

FUSED_HEADS = (64, 80, 128)
"""Sizes of a head for which MLX's attention keeps no scores in memory."""
SLICE = 512
"""Most rows of a block that are computed in one step."""


class Features(Struct, frozen=True):
    """Features of an image."""

    embeddings: mx.array
    """In place of those of its tokens (n, dim)."""
    deepstack: tuple[mx.array, ...] = ()
    """Arrays (n, dim), the i-th of which is added to the states after layer i of the text model."""

    def part(self, first: int, last: int) -> "Features":
        """Features `[first, last)`."""
        deepstack = tuple(level[first:last] for level in self.deepstack)
        return Features(self.embeddings[first:last], deepstack)

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.embeddings.nbytes + sum(level.nbytes for level in self.deepstack)


class VisionTower(nn.Module):  # type: ignore[misc]
    """Tower of one checkpoint; families implement `enter` and `leave` at least."""

    patches: str = ""
    """Weight of the patch convolution, which is a matrix here."""
    is_scaled = True
    """Whether scores are divided by the root of a head's size."""

    @property
    def sequence(self) -> list[VisionBlock]:
        """Blocks in order."""
        return list(self.encoder["layers"])

    def arranged(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights of a checkpoint, laid out as here."""
        if not self.patches:
            return weights
        return weights | {self.patches: patch_matrix(weights[self.patches])}

    def enter(self, pixels: mx.array, size: ImageSize) -> tuple[mx.array, Any]:
        """Hidden states before the first block, and a second input of all."""
        raise NotImplementedError

    def tap(self, index: int, hidden: mx.array) -> mx.array | None:
        """Deepstack features after a block, if any."""
        return None

    def leave(self, hidden: mx.array, size: ImageSize) -> mx.array:
        """Embeddings (n, dim) of the hidden states after the last block."""
        raise NotImplementedError


class Encoding:
    """One image on its way through a tower.

    A step is a block, or a slice of the rows of one with more than `SLICE`. How an image is cut
    follows its size alone, so that its features do not depend on what runs beside it.
    """

    features: Features | None = None
    """Evaluated features, once `advance` has said True."""

    def __init__(self, tower: VisionTower, pixels: Any, size: ImageSize) -> None:
        self._tower = tower
        self._size = size
        self._live: tuple[mx.array, ...] = (mx.array(pixels),)
        self._steps = self._encode(*self._live)

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays that the next steps need."""
        return sum(array.nbytes for array in self._live)

    def advance(self, n_steps: int) -> bool:
        """Evaluate the next `n_steps` steps; True when the features are complete."""
        for live in islice(self._steps, n_steps):
            self._live = live
        mx.eval(self._live)
        return self.features is not None

    def _encode(self, pixels: mx.array) -> Iterator[tuple[mx.array, ...]]:
        """Arrays to evaluate and to keep after each step."""
        hidden, beside = self._tower.enter(pixels, self._size)
        n = hidden.shape[0]
        # Equal slices take equal time, which sizes the next step.
        size = ceil(n / ceil(n / SLICE))
        taps: list[mx.array] = []
        for index, block in enumerate(self._tower.sequence):
            qkv = block.inputs(hidden, beside)
            attend = _attention(*qkv, self._tower.is_scaled)
            rows: list[mx.array] = []
            for i in range(0, n, size):
                rows.append(block.output(hidden[i : i + size], attend(i, i + size)))
                yield hidden, *qkv, *rows, *taps
            hidden = mx.concatenate(rows)
            if (tapped := self._tower.tap(index, hidden)) is not None:
                taps.append(tapped)
        embeddings = self._tower.leave(hidden, self._size)
        self.features = Features(embeddings, tuple(taps))
        yield embeddings, *taps


def _attention(
    q: mx.array, k: mx.array, v: mx.array, is_scaled: bool
) -> Callable[[int, int], mx.array]:
    """Attention (n, heads * dim) of the rows `[first, last)` to all."""
    dim = q.shape[-1]
    more = next((fused for fused in FUSED_HEADS if fused >= dim), dim) - dim
    if more:
        wider = [(0, 0)] * 3 + [(0, more)]
        q = mx.pad(q, wider)
        k = mx.pad(k, wider)
        v = mx.pad(v, wider)
    scale = dim**-0.5 if is_scaled else 1.0

    def attend(first: int, last: int) -> mx.array:
        rows = q[:, :, first:last]
        out = mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale)[0, ..., :dim]
        return out.transpose(1, 0, 2).flatten(1)

    return attend
