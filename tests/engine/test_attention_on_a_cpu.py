"""Attention of single tokens on a CPU, written out in operations."""

from typing import Any

import mlx.core as mx
import pytest

from mlxstack.engine.decode.row_views import RaggedArray
from mlxstack.engine.model.attention_patch import N_LONG, attend
from mlxstack.engine.model.prefixed_cache import PrefixedArray

pytestmark = pytest.mark.mlx

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = (3, N_LONG - 1, N_LONG, 3 * N_LONG)
N_SHARED = 2 * N_LONG


def noise(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def theirs(
    queries: mx.array, keys: Any, values: Any, sinks: mx.array | None, dtype: mx.Dtype = mx.float32
) -> mx.array:
    """Attention of each row as mlx-lm computes it alone, in this precision."""
    rows = [
        mx.fast.scaled_dot_product_attention(
            *(a.astype(dtype) for a in (queries[i : i + 1], k, v)),
            scale=0.25,
            sinks=None if sinks is None else sinks.astype(dtype),
        )
        for i, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    return mx.concatenate(rows)


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one.astype(mx.float32) - other).max().item().real)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_short_and_long_rows_are_as_in_mlx_lm(dtype: mx.Dtype, has_sinks: bool) -> None:
    queries = 8 * noise(0, len(LENGTHS), HEADS, 1, DIM, dtype=dtype)
    keys, values = (
        [noise(10 * part + n, 1, KV_HEADS, n, DIM, dtype=dtype) for n in LENGTHS] for part in (1, 2)
    )
    sinks = 4 * noise(3, HEADS) if has_sinks else None
    out = attend(queries, RaggedArray(keys), RaggedArray(values), None, 0.25, None, sinks)
    assert out.dtype == dtype
    exact = theirs(queries, keys, values, sinks)
    rounding = difference(theirs(queries, keys, values, sinks, dtype), exact)
    assert difference(out, exact) <= max(3e-6, rounding)


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_long_shared_prefix_is_as_in_mlx_lm(n_rows: int, has_sinks: bool) -> None:
    queries = 8 * noise(0, n_rows, HEADS, 1, DIM)
    shared = [noise(part, 1, KV_HEADS, N_SHARED, DIM) for part in (1, 2)]
    split = [
        [PrefixedArray(one, noise(10 * part + n, 1, KV_HEADS, 5 + n, DIM)) for n in range(n_rows)]
        for part, one in enumerate(shared)
    ]
    sinks = 4 * noise(3, HEADS) if has_sinks else None
    out = attend(queries, *map(RaggedArray, split), None, 0.25, None, sinks)
    whole = ([one.joined() for one in each] for each in split)
    assert difference(out, theirs(queries, *whole, sinks)) < 3e-6
