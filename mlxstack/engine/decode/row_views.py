"""Thin views over the caches of the running slots, one per layer, for one decode step.

Every slot keeps its own mlx-lm caches; a view hands each row of the batch to its own cache and
gives the model what it expects of a single one. Nothing is merged, padded or copied.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class RaggedArray(mx.array):
    """One array per row of the batch, of different lengths; stands in for a stacked one.

    Latent attention (MLA) multiplies queries by keys outside of the attention function, so
    transposing and multiplying from the left work row by row. It is a subclass of `mx.array`
    because only then does Python ask `__rmatmul__` before the left operand's `__matmul__`.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        # Where an operation takes the stand-in itself, all it gets is not a number.
        dtype = getattr(arrays[0], "dtype", mx.float32)
        super().__init__(float("nan"), dtype)
        self.arrays = list(arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        return self.arrays[index]

    def swapaxes(self, one: int, other: int) -> "RaggedArray":  # type: ignore[override]
        """As `mx.array.swapaxes`."""
        return RaggedArray([array.swapaxes(one, other) for array in self.arrays])

    def astype(self, dtype: mx.Dtype) -> "RaggedArray":  # type: ignore[override]
        """As `mx.array.astype`."""
        return RaggedArray([array.astype(dtype) for array in self.arrays])

    def __rmatmul__(self, left: mx.array) -> "RaggedArray":
        return RaggedArray([left[i : i + 1] @ array for i, array in enumerate(self.arrays)])


def row_of(value: Any, index: int) -> Any:
    """Row `index` of a per-row value; a value without rows (None, "causal") is the same for all."""
    if isinstance(value, RaggedArray):
        return value[index]
    if isinstance(value, mx.array) and value.ndim == 4 and value.shape[0] > 1:
        return value[index : index + 1]
    return value


class KVView:
    """A layer's KV caches of any kind, one per row: rotating, quantised, plain, mixed."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = list(caches)
        self.offset = mx.array([cache.offset for cache in self.caches])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedArray, RaggedArray]:
        """Append (B, heads, 1, dim) row by row; the full keys and values of every row."""
        n_rows = len(self.caches)
        new = zip(mx.split(keys, n_rows), mx.split(values, n_rows), strict=True)
        pairs = [cache.update_and_fetch(*one) for cache, one in zip(self.caches, new, strict=True)]
        return RaggedArray([pair[0] for pair in pairs]), RaggedArray([pair[1] for pair in pairs])

    def keys_and_values(self) -> tuple[RaggedArray, RaggedArray]:
        """What the owner layer has stored, for layers that share its KV."""
        pairs = [cache.keys_and_values() for cache in self.caches]
        return RaggedArray([pair[0] for pair in pairs]), RaggedArray([pair[1] for pair in pairs])

    def make_mask(self, n: int, **options: Any) -> RaggedArray | None:
        """One mask per row, or None when no row needs one."""
        masks = [cache.make_mask(n, **options) for cache in self.caches]
        return None if all(mask is None for mask in masks) else RaggedArray(masks)


class RecurrentStateView(ArraysCache):  # type: ignore[misc]
    """A layer's recurrent state: gathered when read, scattered when written. Fixed size.

    Of mlx-lm's class, because some models write their state to nothing else.
    """

    def __init__(self, caches: Sequence[ArraysCache]) -> None:
        super().__init__(len(caches[0].cache))
        self.caches = list(caches)

    def __getitem__(self, index: int) -> mx.array | None:
        states = [cache[index] for cache in self.caches]
        known = next((state for state in states if state is not None), None)
        if known is None:
            return None
        filled = [mx.zeros_like(known) if state is None else state for state in states]
        return mx.concatenate(filled, axis=0)

    def __setitem__(self, index: int, value: mx.array) -> None:
        for i, cache in enumerate(self.caches):
            cache[index] = value[i : i + 1]

    def advance(self, n: int) -> None:
        """Nothing to do: there is no padding to walk through."""

    def make_mask(self, n: int) -> None:
        """No row is padded."""


class CacheListView:
    """A layer with several caches, such as attention beside a state space model."""

    def __init__(self, caches: Sequence[CacheList]) -> None:
        width = len(caches[0].caches)
        self.views = [view([cache[i] for cache in caches]) for i in range(width)]

    def __getitem__(self, index: int) -> Any:
        return self.views[index]


PER_ROW = (KVCache, QuantizedKVCache, RotatingKVCache, ConcatenateKVCache)


def view(caches: Sequence[Any]) -> Any:
    """The view over one layer's caches. Raises TypeError for a kind that has none."""
    first = caches[0]
    if isinstance(first, PER_ROW):
        return KVView(caches)
    if isinstance(first, ArraysCache):
        return RecurrentStateView(caches)
    if isinstance(first, CacheList):
        return CacheListView(caches)
    raise TypeError(f"a cache of kind {type(first).__name__} cannot be viewed by row")
