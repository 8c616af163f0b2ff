"""CPU attention whose bits depend on neither other queries nor later keys.

BLAS chooses kernels by the shape of a product. So each product has blocks of `BLOCK` keys, which
begin at multiples of it by position, and rows of queries in a layout with equal bits, which is
measured by head dimension; blocks are added in sequence. Keys that a query does not see have a
weight of exactly 0.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache
from msgspec import Struct

from mlxstack.engine.model.cpu_attention import LOG2_E, MASKED, N_TILE, exp2
from mlxstack.engine.model.row_views import RaggedArray, ShiftedKV, row_of
from mlxstack.features.exact.policy import HALF_TWELVES, RowRange
from mlxstack.features.exact.row_padding import has_equal_bits, pad_rows, unpad_rows

BLOCK = 256
"""Keys of a product: the sum over so many runs in one order, whatever the rows are."""
LAYOUTS = (RowRange(8), HALF_TWELVES)
"""Rows of a product; the first with equal bits is used."""
ROW_COUNTS = (1, 2, 5, 6, 7, 12, 13, 24, 64)
"""Row counts of which the bits are compared."""


class KeyBlocks(Struct, frozen=True):
    """Keys or values (KV heads, blocks, `BLOCK`, dim) in parts."""

    parts: tuple[mx.array, ...]
    n_before: int
    """Rows of the first block that hold no key."""

    @property
    def n_blocks(self) -> int:
        """Blocks of all parts."""
        return sum(part.shape[1] for part in self.parts)


def attend_exact(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attention of queries (B, heads, n, dim).

    None for keys that are no plain arrays, and for masks of numbers."""
    if not isinstance(keys, RaggedArray):
        is_plain = isinstance(keys, mx.array) and queries.shape[0] == 1 and _is_boolean(mask)
        if not is_plain:
            return None
        return _attend(queries, keys, values, _start_of(cache, keys, 0), scale, mask, sinks)
    masks = [row_of(mask, i) for i in range(len(keys))]
    if not all(isinstance(array, mx.array) for array in keys.arrays):
        return None
    if not all(map(_is_boolean, masks)):
        return None
    outputs = []
    caches = getattr(cache, "caches", [None] * len(keys))
    for i, n in enumerate(keys.counts):
        row = queries[i : i + 1, :, :n]
        start = _start_of(caches[i], keys[i], keys.n_later[i])
        out = _attend(row, keys[i], values[i], start, scale, masks[i], sinks)
        outputs.append(mx.pad(out, [(0, 0), (0, 0), (0, queries.shape[2] - n), (0, 0)]))
    return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]


def _is_boolean(mask: Any) -> bool:
    return not isinstance(mask, mx.array) or mask.dtype == mx.bool_


class KeyPlaces(Struct, frozen=True):
    """Places of stored keys."""

    start: int
    """Position of the oldest key."""
    oldest: int = 0
    """Its index, in a ring."""


def _start_of(cache: Any, keys: mx.array, n_later: int) -> KeyPlaces:
    """Places of keys that end `n_later` tokens before their cache."""
    if isinstance(cache, ShiftedKV):
        cache = cache.unshifted
    if not isinstance(cache, RotatingKVCache):
        return KeyPlaces(0)
    n_keys = keys.shape[2]
    start = cache.offset - n_later - n_keys
    is_ring = start > 0 and n_keys == cache.keys.shape[2] and 0 < cache._idx < n_keys
    return KeyPlaces(start, cache._idx if is_ring else 0)


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    places: KeyPlaces,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of queries (1, heads, n, dim), by tiles of queries."""
    dtype = queries.dtype
    _, n_heads, n, dim = queries.shape
    n_kv, n_keys = keys.shape[1:3]
    if places.oldest:
        keys = mx.roll(keys, -places.oldest, 2)
        values = mx.roll(values, -places.oldest, 2)
        if isinstance(mask, mx.array):
            mask = mx.roll(mask, -places.oldest, -1)
    grouped = (queries.astype(mx.float32) * (scale * LOG2_E)).reshape(n_kv, -1, n, dim)
    if sinks is not None:
        sinks = (sinks.astype(mx.float32) * LOG2_E).reshape(n_kv, -1, 1)
    step = max(1, N_TILE // (n_keys * n_heads))
    tiles = []
    for first in range(0, n, step):
        stop = min(first + step, n)
        is_causal = isinstance(mask, str)
        n_seen = n_keys - n + stop if is_causal else n_keys
        allowed = None
        if is_causal and stop - first > 1:
            queries_at = mx.arange(n_keys - n + first, n_seen)
            allowed = (mx.arange(n_seen) <= queries_at[:, None])[None]
        elif isinstance(mask, mx.array):
            allowed = mask.reshape(-1, *mask.shape[-2:])[:, first:stop]
        tiles.append(
            _tile(
                grouped[:, :, first:stop],
                _blocks(keys[0, :, :n_seen], places.start),
                _blocks(values[0, :, :n_seen], places.start),
                n_seen,
                allowed,
                sinks,
            )
        )
    out = mx.concatenate(tiles, axis=2) if len(tiles) > 1 else tiles[0]
    return out.reshape(1, n_heads, n, -1).astype(dtype)


@cache
def row_layout(dim: int, n_values: int) -> RowRange:
    """Layout of rows with equal bits by head dimensions.

    The last one where none has, which the check at load notices.
    """
    keys = mx.random.normal((2, BLOCK, dim), key=mx.random.key(1))
    values = mx.random.normal((2, BLOCK, n_values), key=mx.random.key(2))
    query = mx.random.normal((dim,), key=mx.random.key(3))
    weights = mx.random.uniform(shape=(BLOCK,), key=mx.random.key(4))
    for layout in LAYOUTS:
        scores = has_equal_bits(lambda x: x @ keys.swapaxes(-1, -2), query, layout, ROW_COUNTS)
        if scores and has_equal_bits(lambda x: x @ values, weights, layout, ROW_COUNTS):
            return layout
    return LAYOUTS[-1]


def _blocks(keys: mx.array, start: int) -> KeyBlocks:
    """Blocks of keys (KV heads, n, dim) from position `start` on."""
    n_kv, n, dim = keys.shape
    n_before = start % BLOCK
    n_head = min(BLOCK - n_before, n) if n_before else 0
    n_whole = (n - n_head) // BLOCK * BLOCK
    n_tail = n - n_head - n_whole
    parts = []
    if n_head:
        after = BLOCK - n_before - n_head
        head = mx.pad(keys[:, :n_head], [(0, 0), (n_before, after), (0, 0)])
        parts.append(head[:, None])
    if n_whole:
        whole = keys[:, n_head : n_head + n_whole]
        parts.append(whole.reshape(n_kv, -1, BLOCK, dim))
    if n_tail:
        tail = mx.pad(keys[:, n_head + n_whole :], [(0, 0), (0, BLOCK - n_tail), (0, 0)])
        parts.append(tail[:, None])
    return KeyBlocks(tuple(part.astype(mx.float32) for part in parts), n_before)


def _tile(
    queries: mx.array,
    keys: KeyBlocks,
    values: KeyBlocks,
    n_keys: int,
    allowed: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of queries (KV heads, group, n, dim).

    `allowed`: (1 or heads, n, keys)."""
    n_kv, group, n, dim = queries.shape
    n_rows = group * n
    layout = row_layout(dim, values.parts[0].shape[-1])
    rows = pad_rows(queries.reshape(n_kv, 1, n_rows, dim), layout)
    scores = _joined([rows @ part.swapaxes(-1, -2) for part in keys.parts])
    seen = _seen(keys, n_keys, allowed, (n_kv, group, n), layout)
    if seen is not None:
        scores = mx.where(seen, scores, MASKED)
    most = scores.max(axis=(1, 3), keepdims=True)
    if sinks is not None:
        by_row = mx.broadcast_to(sinks, (n_kv, group, n)).reshape(n_kv, 1, n_rows, 1)
        by_row = pad_rows(by_row, layout)
        most = mx.maximum(most, by_row)
    weights = exp2(scores - most)
    if seen is not None:
        weights = mx.where(seen, weights, 0.0)
    total = weights.sum(axis=3, keepdims=True).sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + mx.power(2.0, by_row - most)
    mixed = []
    first = 0
    for part in values.parts:
        mixed.append(weights[:, first : first + part.shape[1]] @ part)
        first += part.shape[1]
    summed = _joined(mixed).sum(axis=1, keepdims=True)
    return unpad_rows(summed / total, layout, n_rows).reshape(n_kv, group, n, -1)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(parts), axis=1) if len(parts) > 1 else parts[0]


def _seen(
    keys: KeyBlocks,
    n_keys: int,
    allowed: mx.array | None,
    shape: tuple[int, int, int],
    layout: RowRange,
) -> mx.array | None:
    """Mask (1 or KV heads, blocks, 1 or rows, `BLOCK`); None: all."""
    n_after = keys.n_blocks * BLOCK - keys.n_before - n_keys
    if allowed is None:
        if not (keys.n_before or n_after):
            return None
        slots = mx.arange(keys.n_blocks * BLOCK).reshape(1, -1, 1, BLOCK)
        return (slots >= keys.n_before) & (slots < keys.n_before + n_keys)
    n_kv, group, n = shape
    padded = mx.pad(allowed, [(0, 0), (0, 0), (keys.n_before, n_after)])
    if padded.shape[0] == 1:
        rows = mx.broadcast_to(padded[:, None], (1, group, n, padded.shape[-1]))
    else:
        rows = padded.reshape(n_kv, group, n, -1)
    rows = pad_rows(rows.reshape(rows.shape[0], group * n, -1), layout)
    return rows.reshape(*rows.shape[:2], -1, BLOCK).swapaxes(1, 2)
