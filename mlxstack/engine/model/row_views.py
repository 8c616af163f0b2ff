"""Views over the caches of running slots, one per layer.

Every slot keeps its own mlx-lm caches; a view hands the tokens of each slot to its own cache and
gives the model what it expects of a single one. Caches are not merged. The tokens of a slot are
rows of a batch (N, 1), without padding; models with recurrent layers, which need sequences, get
one padded row per slot (slots, longest).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import ReferenceType, ref

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from msgspec import Struct

from mlxstack.engine.model.recurrent_cache import RecurrentUpdates


class RaggedArray(mx.array):
    """Arrays of different lengths, one per row of the batch.

    `counts` are the queries of each row that are not padding, or of each slot in a `PromptView`.

    Latent attention (MLA) multiplies queries by keys outside of the attention function, so
    transposing and multiplying from the left work row by row. It is a subclass of `mx.array`
    because only then does Python ask `__rmatmul__` before the left operand's `__matmul__`.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        counts: Sequence[int] | None = None,
        n_later: Sequence[int] | None = None,
    ) -> None:
        # Where an operation takes the stand-in itself, all it gets is not a number.
        dtype = getattr(arrays[0], "dtype", mx.float32)
        super().__init__(float("nan"), dtype)
        self.arrays = list(arrays)
        self.counts = counts or [1] * len(self.arrays)
        self.n_later = n_later or [0] * len(self.arrays)
        """Tokens that the cache of each row holds after its last key."""

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        return self.arrays[index]

    def swapaxes(self, first_axis: int, second_axis: int) -> "RaggedArray":  # type: ignore[override]
        """As `mx.array.swapaxes`."""
        return RaggedArray([array.swapaxes(first_axis, second_axis) for array in self.arrays])

    def astype(self, dtype: mx.Dtype) -> "RaggedArray":  # type: ignore[override]
        """As `mx.array.astype`."""
        return RaggedArray([array.astype(dtype) for array in self.arrays])

    def __rmatmul__(self, left: mx.array) -> "RaggedArray":
        rows = mx.split(left, len(self.arrays))
        return RaggedArray([row @ array for row, array in zip(rows, self.arrays, strict=True)])


def row_of(value: Any, index: int) -> Any:
    """Row `index` of a per-row value; None and "causal" hold for all."""
    if isinstance(value, RaggedArray):
        return value[index]
    if isinstance(value, mx.array) and value.ndim == 4 and value.shape[0] > 1:
        return value[index : index + 1]
    return value


class KVView:
    """KV caches of a layer of any kind, one per slot.

    Token j of a slot is a row of its own that sees the slot's keys up to itself, so a step of
    several tokens runs the attention of as many single steps.
    """

    def __init__(
        self, slots: Sequence[Any], counts: Sequence[int], shifts: Sequence[int] = ()
    ) -> None:
        entries = list(zip(slots, counts, shifts or [0] * len(slots), strict=True))
        self._slots = list(slots)
        self._counts = counts
        self.caches = [slot for slot, n in zip(slots, counts, strict=True) for _ in range(n)]
        """The cache of each row."""
        self.offset = mx.array(
            [slot.offset + shift + j for slot, n, shift in entries for j in range(n)]
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedArray, RaggedArray]:
        """Append (N, heads, 1, dim); returns keys and values of each row."""
        ends = list(accumulate(self._counts))[:-1]
        new = zip(mx.split(keys, ends), mx.split(values, ends), strict=True)
        stored = []
        for slot, n, pair in zip(self._slots, self._counts, new, strict=True):
            k, v = (a if n == 1 else a.transpose(2, 1, 0, 3) for a in pair)
            stored.append(slot.update_and_fetch(k, v))
        return self._by_row(stored)

    def keys_and_values(self) -> tuple[RaggedArray, RaggedArray]:
        """Stored keys and values of each row."""
        return self._by_row([slot.keys_and_values() for slot in self._slots])

    def _by_row(self, stored: Sequence[tuple[Any, Any]]) -> tuple[RaggedArray, RaggedArray]:
        """Keys and values of the slots, by row."""
        pairs: list[tuple[Any, Any]] = []
        for slot, n, (keys, values) in zip(self._slots, self._counts, stored, strict=True):
            if n == 1:
                pairs.append((keys, values))
                continue
            bounds = _bounds(slot, n, _length(keys))
            pairs += [(_cut_tokens(keys, *b), _cut_tokens(values, *b)) for b in bounds]
        n_later = [n - 1 - j for n in self._counts for j in range(n)]
        keys, values = zip(*pairs, strict=True)
        return RaggedArray(keys, n_later=n_later), RaggedArray(values, n_later=n_later)

    def make_mask(self, n: int, **options: Any) -> RaggedArray | None:
        """One mask per row, or None when no row needs one."""
        slot_masks = [
            _masks(s, n, **options) for s, n in zip(self._slots, self._counts, strict=True)
        ]
        return _ragged([mask for slot in slot_masks for mask in slot])


class PromptView(KVView):
    """KV caches of a layer, for prompts that share a pass.

    Tokens are rows as in `KVView`, but those of a slot attend together: the keys and values, the
    masks and the queries that `counts` tells are by slot.
    """

    def __init__(
        self, slots: Sequence[Any], counts: Sequence[int], shifts: Sequence[int] = ()
    ) -> None:
        super().__init__(slots, counts, shifts)
        self.caches = list(slots)

    def make_mask(self, n: int, **options: Any) -> RaggedArray:
        """One mask per slot, for all of its tokens."""
        pairs = zip(self._slots, self._counts, strict=True)
        return RaggedArray([slot.make_mask(count, **options) for slot, count in pairs])

    def _by_row(self, stored: Sequence[tuple[Any, Any]]) -> tuple[RaggedArray, RaggedArray]:
        keys, values = zip(*stored, strict=True)
        return RaggedArray(keys, self._counts), RaggedArray(values, self._counts)


class PaddedKVView:
    """KV caches of a layer, one per slot, rows padded right."""

    def __init__(
        self, caches: Sequence[Any], counts: Sequence[int], shifts: Sequence[int] = ()
    ) -> None:
        self.caches = list(caches)
        self._counts = counts
        pairs = zip(caches, shifts or [0] * len(caches), strict=True)
        self.offset = mx.array([cache.offset + shift for cache, shift in pairs])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedArray, RaggedArray]:
        """Append (slots, heads, longest, dim) without padding; returns each row's KV."""
        for i, (cache, n) in enumerate(zip(self.caches, self._counts, strict=True)):
            cache.update_and_fetch(*(a[i : i + 1, :, :n] for a in (keys, values)))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[RaggedArray, RaggedArray]:
        """The stored keys and values of each row."""
        keys, values = zip(*(cache.keys_and_values() for cache in self.caches), strict=True)
        return RaggedArray(keys, self._counts), RaggedArray(values, self._counts)

    def make_mask(self, n: int, **options: Any) -> RaggedArray | None:
        """One mask per row, or None when no row needs one."""
        pairs = zip(self.caches, self._counts, strict=True)
        return _ragged([cache.make_mask(n, **options) for cache, n in pairs])


class CommonKV:
    """Base of KV caches of several rows in common arrays.

    Each row has one query; masks hide the padding of shorter rows.
    """


class StackedStates:
    """Recurrent states of several rows in one array.

    Rows that stay the same read what they wrote without a copy. A stacked state shares its buffer
    with the slices, and lives no longer than the first of them.
    """

    def __init__(self) -> None:
        self._by_first: dict[int, tuple[mx.array, list[ReferenceType[mx.array]]]] = {}

    def split(self, stacked: mx.array) -> list[mx.array]:
        """Slice of each row."""
        rows = [stacked[i : i + 1] for i in range(stacked.shape[0])]
        key = id(rows[0])
        first = ref(rows[0], lambda _: self._by_first.pop(key, None))
        self._by_first[key] = stacked, [first, *map(ref, rows[1:])]
        return rows

    def join(self, rows: list[mx.array]) -> mx.array:
        """Stacked state of these rows: the one they are slices of, or a copy."""
        stacked, slices = self._by_first.get(id(rows[0]), (None, []))
        is_same = len(slices) == len(rows) and all(
            own() is row for own, row in zip(slices, rows, strict=True)
        )
        if stacked is not None and is_same:
            return stacked
        return mx.concatenate(rows, axis=0)


STACKED_STATES = StackedStates()


class RecurrentStateView(RecurrentUpdates, ArraysCache):  # type: ignore[misc]
    """A layer's recurrent state: joined when read, split when written. Fixed size.

    Of mlx-lm's class, because some models write their state to nothing else; `lengths` is how
    these models are told of padding.
    """

    def __init__(self, caches: Sequence[ArraysCache], counts: Sequence[int]) -> None:
        super().__init__(len(caches[0].cache))
        self.caches = list(caches)
        if len(set(counts)) > 1:
            self.prepare(lengths=counts)

    def __getitem__(self, index: int) -> mx.array | None:
        states = [cache[index] for cache in self.caches]
        first = next((state for state in states if state is not None), None)
        if first is None:
            return None
        filled = [mx.zeros_like(first) if state is None else state for state in states]
        return STACKED_STATES.join(filled)

    def __setitem__(self, index: int, value: mx.array) -> None:
        for cache, state in zip(self.caches, STACKED_STATES.split(value), strict=True):
            cache[index] = state


PER_ROW = (KVCache, QuantizedKVCache, RotatingKVCache, ConcatenateKVCache)


class ShiftedKV:
    """KV cache of a lone slot with positions other than indices.

    A layer of a vision model adds `added` to its output.
    """

    def __init__(self, cache: Any, offset: Any, added: mx.array | None) -> None:
        self._cache = cache
        self.unshifted = cache
        self.offset = offset
        self.added = added

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class ExtraPairs(Struct, frozen=True):
    """Pairs of tokens that a mask also allows."""

    pairs: mx.array
    """Which of them (n, n) attend to each other."""
    only_in_windows: bool = False
    """Whether they do so in layers with a window alone, and within it."""

    def within(self, window: int | None) -> mx.array | None:
        """Pairs for a layer with a window of keys, or with none."""
        if not self.only_in_windows:
            return self.pairs
        if window is None:
            return None
        indices = mx.arange(self.pairs.shape[0])
        return self.pairs & (indices[:, None] - indices < window)


class MaskedKV(ShiftedKV):
    """KV cache of a lone slot whose tokens attend to more than the mask allows."""

    def __init__(self, cache: Any, together: ExtraPairs) -> None:
        super().__init__(cache, cache.offset, None)
        self._together = together

    def make_mask(self, n: int, **options: Any) -> Any:
        """The mask of the cache (n, keys), and the pairs."""
        pairs = self._together.within(options.get("window_size"))
        if pairs is None:
            return self._cache.make_mask(n, **options)
        mask = self._cache.make_mask(n, **{**options, "return_array": True})
        if mask is None:
            return pairs
        own = mask[..., -n:] | pairs
        return mx.concatenate([mask[..., :-n], own], axis=-1)


def masked(cache: Any, together: ExtraPairs) -> Any:
    """Cache whose mask allows these pairs too; other layers attend to nothing."""
    if isinstance(cache, PER_ROW):
        return MaskedKV(cache, together)
    return cache


def shifted(cache: Any, shift: int | mx.array, added: mx.array | None = None) -> Any:
    """Cache with a shifted offset, or with positions (3, n).

    Recurrent layers know no positions.
    """
    if not isinstance(cache, PER_ROW):
        return cache
    offset = shift if isinstance(shift, mx.array) else cache.offset + shift
    return ShiftedKV(cache, offset, added)


class RowCaches:
    """Caches of a layer of any kind, by row.

    For a module that computes one row at a time, a single token, over the slot's own cache.
    """

    def __init__(
        self, slots: Sequence[Any], counts: Sequence[int], shifts: Sequence[int] = ()
    ) -> None:
        assert set(counts) == {1}, "rows of several tokens have passes of their own"
        pairs = zip(slots, shifts or [0] * len(slots), strict=True)
        self.caches = [shifted(slot, shift) if shift else slot for slot, shift in pairs]

    def __getitem__(self, index: int) -> Any:
        """Caches `index` of a layer that has several."""
        return view([slot[index] for slot in self.caches], [1] * len(self.caches), RowCaches)

    @property
    def offset(self) -> mx.array:
        """Position (rows,) of the next token of each row."""
        counting = (slot if hasattr(slot, "offset") else slot[0] for slot in self.caches)
        return mx.array([cache.offset for cache in counting])

    def make_mask(self, n: int, **options: Any) -> RaggedArray | None:
        """One mask per row, or None when no row needs one."""
        return _ragged([slot.make_mask(n, **options) for slot in self.caches])


ViewKind = type[KVView | PaddedKVView | RowCaches]


def view(
    caches: Sequence[Any],
    counts: Sequence[int],
    kind: ViewKind = KVView,
    shifts: Sequence[int] = (),
) -> Any:
    """View over one layer's caches, `counts` tokens each.

    It is of this `kind` over KV, `RowCaches` over caches of any kind but recurrent state.
    Positions are indices plus the `shifts` of their slots.
    Raises TypeError for a kind of cache that has none.
    """
    first = caches[0]
    if isinstance(first, ArraysCache):
        return RecurrentStateView(caches, counts)
    if isinstance(first, PER_ROW) or kind is RowCaches:
        return kind(caches, counts, shifts)
    if isinstance(first, CacheList):
        # A layer with several caches, such as attention beside a state space model.
        inner = zip(*(cache.caches for cache in caches), strict=True)
        return [view(layers, counts, kind, shifts) for layers in inner]
    raise TypeError(f"a cache of kind {type(first).__name__} cannot be viewed by row")


def _ragged(masks: Sequence[Any]) -> RaggedArray | None:
    """Masks by row, or None when no row needs one."""
    if all(mask is None for mask in masks):
        return None
    return RaggedArray(masks)


def _bounds(cache: Any, n: int, length: int) -> list[tuple[int, int]]:
    """Mask of `length` stored keys for the last `n` tokens."""
    window = cache.max_size if isinstance(cache, RotatingKVCache) else length
    return [(max(0, end - window), end) for end in range(length - n + 1, length + 1)]


def _masks(cache: Any, n: int, **options: Any) -> list[Any]:
    """Masks of the next `n` tokens over their keys."""
    if n == 1:
        return [cache.make_mask(1, **options)]
    window = options.get("window_size")
    stored = getattr(cache, "max_size", None)
    if window is None or (stored is not None and stored <= window):
        return [None] * n
    mask = cache.make_mask(n, **{**options, "return_array": True})
    bounds = _bounds(cache, n, mask.shape[-1])
    return [mask[..., j : j + 1, slice(*b)] for j, b in enumerate(bounds)]


def _length(part: Any) -> int:
    """Number of tokens in keys or values, which are three arrays when quantized."""
    return int((part if isinstance(part, mx.array) else part[0]).shape[2])


def _cut_tokens(part: Any, start: int, stop: int) -> Any:
    """Keys or values of the tokens [start, stop)."""
    if isinstance(part, mx.array):
        return part[..., start:stop, :]
    return tuple(array[..., start:stop, :] for array in part)
