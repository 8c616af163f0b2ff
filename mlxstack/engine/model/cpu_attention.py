"""Attention on a CPU: softmax, single queries, tiles of many queries.

MLX's fused function composes operations there, with one call of `exp` per score, repeats shared
heads and holds all scores at once.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlxstack.engine.device import has_gpu

N_LONG = 192
"""Scores per row from which a few more operations cost less than `mx.exp`."""

N_MANY = 32768
"""Exponents from which a polynomial costs less than `mx.power`."""

E = mx.array(2.718281828459045)
LOG2_E = 1.4426950408889634
MIN_EXPONENT = -100.0
"""Base-2 exponent that replaces all below it: 1e-30 is nothing beside 1, and not subnormal."""

ROUNDING = 1.5 * 2.0**23
"""The sum with a float32 has no fraction; its last bits are the rounded float32 as an integer."""

EXP2 = (
    1.0000001192092896, 0.6931469440460205, 0.24022120237350464, 0.05550713092088699,
    0.009675540961325169, 0.001327647129073739,
)  # fmt: skip
"""Minimax polynomial of 2**x on [-0.5, 0.5]; relative error 7.5e-8 before rounding."""

MASKED = -1e30
"""Score of a masked key; finite, so that a query without any key gives no NaN."""

N_TILE = 1 << 18
"""Scores of a tile: 1 MiB, which stay in a core's cache from one operation to the next."""

MIN_TILE_QUERIES = 8
"""Queries of a tile, however many keys there are."""


def exponential(exponents: mx.array) -> mx.array:
    """Exponentials of float32 that are at most 0."""
    if has_gpu():
        return mx.exp(exponents)
    if exponents.size < N_MANY:
        return mx.power(E, exponents)
    return exp2(exponents * LOG2_E)


def exp2(exponents: mx.array) -> mx.array:
    """Powers of 2 of float32 that are at most 0.

    The integer part becomes exponent bits, the fraction goes into a polynomial.
    MLX compiles sums and products to vector instructions, but `exp` to one call per number.
    """
    whole = mx.maximum(exponents, MIN_EXPONENT)
    rounded = whole + ROUNDING
    fraction = whole - (rounded - ROUNDING)
    power = fraction * EXP2[-1] + EXP2[-2]
    for factor in reversed(EXP2[:-2]):
        power = power * fraction + factor
    shifted = mx.left_shift(mx.view(rounded, mx.int32), mx.array(23))
    return mx.view(mx.view(power, mx.int32) + shifted, mx.float32)


def sums(weights: mx.array) -> mx.array:
    """Sums over the last axis; many by a product, which is faster."""
    if weights.size < N_MANY or has_gpu():
        return weights.sum(axis=-1, keepdims=True)
    return weights @ mx.ones((weights.shape[-1], 1), weights.dtype)


def are_even(scores: Sequence[mx.array]) -> bool:
    """Whether the scores of several rows have one length."""
    return len(scores) > 1 and len({row_scores.shape[-1] for row_scores in scores}) == 1


def joined(rows: Sequence[mx.array]) -> mx.array:
    """The rows of a batch as one array."""
    if len(rows) > 1:
        return mx.concatenate(list(rows))
    return rows[0]


def products(queries: mx.array, keys: mx.array) -> mx.array:
    """Products of queries and keys.

    Queries (..., n, dim) times keys (..., tokens, dim) give scores (..., n, tokens).
    """
    if queries.shape[-2] <= 2 and keys.shape[-2] >= N_LONG and not has_gpu():
        # OpenBLAS copies its second operand: all keys for one or two queries.
        return mx.contiguous((keys @ queries.swapaxes(-1, -2)).swapaxes(-1, -2))
    out: mx.array = queries @ keys.swapaxes(-1, -2)
    return out


def attend_single(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    sinks: mx.array | None,
    mask: mx.array | None = None,
) -> mx.array:
    """Attention of scaled queries (B, heads, 1, dim), also over stacked rows.

    A `mask` (rows, 1 or heads, 1, keys) belongs to stacked rows: bool, or scores to add.
    """
    rows, heads, _, dim = queries.shape
    grouped = queries.reshape(rows, -1, heads // keys[0].shape[1], dim)
    row_queries = mx.split(grouped, len(keys)) if len(keys) > 1 else [grouped]
    if sinks is not None:
        sinks = sinks.astype(queries.dtype).reshape(1, *grouped.shape[1:3], 1)
    scores = [products(query, k) for query, k in zip(row_queries, keys, strict=True)]
    if mask is not None:
        scores = [_masked(scores[0], mask)]
    if are_even(scores):
        mixed = _mixed(scores, values, sinks)
    else:
        mixed = joined(
            [_mixed([row_scores], [v], sinks) for row_scores, v in zip(scores, values, strict=True)]
        )
    return mixed.reshape(rows, heads, 1, -1)


def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.array(MASKED, scores.dtype))
    return scores + mask.reshape(scores.shape)


def _mixed(
    scores: Sequence[mx.array], values: Sequence[mx.array], sinks: mx.array | None
) -> mx.array:
    """Sums of values by softmax of scores and sinks."""
    if len(scores) == 1 and scores[0].shape[-1] < N_LONG:
        return _mixed_short(scores[0], values[0], sinks)
    exact = joined(scores).astype(mx.float32)
    most = exact.max(axis=-1, keepdims=True)
    if sinks is not None:
        most = mx.maximum(most, sinks)
    weights = exponential(exact - most)
    total = sums(weights)
    if sinks is not None:
        total = total + mx.exp(sinks - most)
    row_weights = mx.split(weights.astype(values[0].dtype), len(scores))
    mixed = joined([weight @ v for weight, v in zip(row_weights, values, strict=True)])
    return (mixed.astype(mx.float32) / total).astype(mixed.dtype)


def _mixed_short(scores: mx.array, values: mx.array, sinks: mx.array | None) -> mx.array:
    """As `_mixed`, in fewer operations for few scores."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True) @ values
    beside = mx.broadcast_to(sinks, (*scores.shape[:-1], 1))
    both = mx.concatenate([beside, scores], axis=-1)
    return mx.softmax(both, axis=-1, precise=True)[..., 1:] @ values


def is_tiled(queries: mx.array, keys: mx.array, mask: mx.array | str | None) -> bool:
    """Whether queries (B, heads, n, dim) and mask can be cut into tiles."""
    n_rows, heads, n, _ = queries.shape
    if isinstance(mask, mx.array):
        can_cut = mask.dtype == mx.bool_ and mask.size == n * keys.shape[2]
    else:
        can_cut = mask in (None, "causal")
    is_large = n > 1 and heads * n * keys.shape[2] >= N_MANY
    return can_cut and is_large and n_rows == 1 and queries.dtype == mx.float32


def attend_tiled(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of queries (1, heads, n, dim), tile by tile.

    Exponentials are to the base 2. A tile has some queries and a KV head, or all heads where all
    queries fit. Causal tiles read only the keys that their queries see.
    """
    _, heads, n, dim = queries.shape
    n_kv, n_keys = keys.shape[1:3]
    grouped = (queries * (scale * LOG2_E)).reshape(1, n_kv, heads // n_kv, n, dim)
    if sinks is not None:
        sinks = (sinks * LOG2_E).reshape(1, n_kv, heads // n_kv, 1, 1)
    kv_heads = [slice(None)]
    step = n
    if heads * n * n_keys > N_TILE:
        kv_heads = [slice(i, i + 1) for i in range(n_kv)]
        step = max(MIN_TILE_QUERIES, N_TILE // (n_keys * heads // n_kv))
    tiles = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        n_seen = n_keys - n + stop if mask == "causal" else n_keys
        bias = _bias(mask, start, stop, n_seen)
        parts = [
            _tile(
                grouped[:, head, :, start:stop],
                keys[:, head, :n_seen],
                values[:, head, :n_seen],
                bias,
                None if sinks is None else sinks[:, head],
            )
            for head in kv_heads
        ]
        tiles.append(mx.concatenate(parts, axis=1))
    return mx.concatenate(tiles, axis=3).reshape(1, heads, n, -1)


def _bias(mask: mx.array | str | None, start: int, stop: int, n_seen: int) -> mx.array | None:
    """Scores (queries, `n_seen` keys) that mask keys of [start, stop); None for all keys.

    MLX adds a small array to the scores of each head faster than it chooses by one.
    """
    if mask is None:
        return None
    if isinstance(mask, mx.array):
        allowed = mask.reshape(mask.shape[-2:])[start:stop]
    else:
        allowed = mx.arange(n_seen) <= mx.arange(n_seen - stop + start, n_seen)[:, None]
    return mx.where(allowed, 0.0, MASKED)


def _tile(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bias: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of queries (1, KV heads, group, n, dim)."""
    _, n_kv, group, n, dim = queries.shape
    scores = queries.reshape(1, n_kv, -1, dim) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(1, n_kv, group, n, -1)
    if bias is not None:
        scores = scores + bias
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        most = mx.maximum(most, sinks)
    weights = exp2(scores - most).reshape(1, n_kv, group * n, -1)
    total = sums(weights).reshape(most.shape)
    if sinks is not None:
        total = total + mx.power(2.0, sinks - most)
    out = (weights @ values).reshape(1, n_kv, group, n, -1)
    return out / total
