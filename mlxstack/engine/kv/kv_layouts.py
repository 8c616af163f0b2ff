"""Layouts of a model's KV, against which stored KV is checked.

A checksum says that a file is as it was written, not that it was written for this model.
"""

from functools import partial
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.errors import Damaged
from mlxstack.core.interfaces import KVFile, KVFileHeader
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.segments import Segment, SegmentLayout
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.model.cache_adapters import CacheFactory, LayerState
from mlxstack.engine.model.runner import ModelRunner, fill

N_DIMS = 4
"""Dimensions of keys and values: (batch, heads, tokens, dim)."""


class ArrayLayout(Struct, frozen=True):
    """Type and dimensions of an array of state, but for its tokens."""

    dtype: Any
    dims: tuple[int, ...]


class LayerLayout(Struct, frozen=True):
    """Arrays of a layer's state, None where unset; it has `n_numbers` numbers.

    A state with a skeleton of its own has arrays of any dimensions.
    """

    arrays: tuple[ArrayLayout | None, ...]
    n_numbers: int
    is_own: bool = False


class KVLayouts:
    """Layouts of segments, plain and quantized, and of checkpoints. MLX thread only.

    They are measured by a pass of a few tokens when they are first needed. Without a `runner` they
    are not, and stored KV is not compared, as where a pass has several parts.
    """

    def __init__(self, runner: ModelRunner | None, cache_factory: CacheFactory) -> None:
        self._runner = runner
        self._cache_factory = cache_factory
        self._segments: list[SegmentLayout] = []
        self._states: list[tuple[LayerLayout, ...]] = []

    def check_head(self, head: KVFileHeader) -> None:
        """Raise Damaged unless this is a segment of this model."""
        layout = segments.layout_of_head(head)
        if self._is_measured() and layout not in self._segments:
            raise Damaged(f"the KV file {head.key} is not of this model")

    def part_of(self, file: KVFile) -> Segment | StateCheckpoint:
        """Arrays of a file. Raises Damaged unless they are of this model."""
        part = segments.part_of(file)
        if not self._is_measured():
            return part
        if isinstance(part, Segment):
            is_ours = _n_tokens_fit(part) and segments.segment_layout(part) in self._segments
        else:
            is_ours = any(_fits(_state_layout(part), reference) for reference in self._states)
        if not is_ours:
            raise Damaged(f"the KV file {file.key} is not of this model")
        return part

    def _is_measured(self) -> bool:
        """Whether the layouts are known, after a measurement at the first call."""
        if self._runner is None or self._segments:
            return self._runner is not None
        for n_tokens in {0, self._cache_factory.quantized_start}:
            context = SlotContext(self._cache_factory).new_empty(n_tokens)
            context.caches = list(fill(self._runner, partial(self._cache_factory.make, n_tokens)))
            self._segments.append(segments.segment_layout(segments.pack(context, 0, 1)))
            context.checkpoint()
            self._states += [_state_layout(checkpoint) for checkpoint in context.checkpoints]
        return True


def _n_tokens_fit(part: Segment) -> bool:
    n_tokens = part.end - part.start
    return all(group.ndim == N_DIMS and group.shape[2] == n_tokens for group in part.groups)


def _state_layout(checkpoint: StateCheckpoint) -> tuple[LayerLayout, ...]:
    return tuple(map(_layer_layout, checkpoint.states))


def _layer_layout(layer: LayerState) -> LayerLayout:
    if layer.skeleton:
        return LayerLayout((), 0, is_own=True)
    return LayerLayout(tuple(map(_array_layout, layer.arrays)), len(layer.numbers))


def _array_layout(array: mx.array | None) -> ArrayLayout | None:
    if array is None:
        return None
    # A window has as many tokens as it holds.
    dims = (*array.shape[:2], *array.shape[3:]) if array.ndim == N_DIMS else array.shape
    return ArrayLayout(array.dtype, tuple(dims))


def _fits(layout: tuple[LayerLayout, ...], reference: tuple[LayerLayout, ...]) -> bool:
    """Whether layers and set arrays are those of the reference."""
    if len(layout) != len(reference):
        return False
    for layer, expected in zip(layout, reference, strict=True):
        if layer.is_own != expected.is_own:
            return False
        if (len(layer.arrays), layer.n_numbers) != (len(expected.arrays), expected.n_numbers):
            return False
        pairs = zip(layer.arrays, expected.arrays, strict=True)
        if any(theirs is not None and ours != theirs for ours, theirs in pairs):
            return False
    return True
