"""Attention on a CPU, written out in operations."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstack.engine.decode.attention_patch import attend
from mlxstack.engine.model.cpu_attention import N_LONG, N_MANY, exponential, is_tiled
from mlxstack.engine.model.row_views import RaggedArray
from tests.tolerance import ROUNDING, distance

pytestmark = pytest.mark.mlx

HEADS = 4
KV_HEADS = 2
DIM = 16
LENGTHS = (3, N_LONG - 1, N_LONG, 3 * N_LONG)


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


def root_mean_square(errors: mx.array) -> float:
    return float(mx.sqrt(mx.square(errors).mean()).item().real)


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
    if dtype == mx.float32:
        assert distance(out, exact) <= ROUNDING
    else:
        # Of single numbers now ours, now theirs is rounded better.
        rounded = theirs(queries, keys, values, sinks, dtype)
        assert root_mean_square(out - exact) <= 1.05 * root_mean_square(rounded - exact)


def window(n: int, n_keys: int) -> mx.array:
    """Which keys the last n tokens see through a window of 100."""
    at = mx.arange(n_keys - n, n_keys)[:, None]
    key = mx.arange(n_keys)
    return (key <= at) & (key > at - 100)


def exactly(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, sinks: mx.array | None
) -> Any:
    """Attention in float64."""
    group = queries.shape[1] // keys.shape[1]
    q, k, v = (np.array(a).astype(np.float64) for a in (queries, keys, values))
    scores = 0.25 * q @ np.repeat(k, group, 1).swapaxes(-1, -2)
    weights = np.exp(np.where(np.array(mask), scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.array(sinks).astype(np.float64))[:, None, None]
    return weights @ np.repeat(v, group, 1) / total


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("heads", [2, 12])
@pytest.mark.parametrize(("n", "n_keys"), [(150, 150), (30, 1500), (7, 9000), (600, 700)])
@pytest.mark.parametrize("mask", ["causal", "window", None])
def test_tiles_of_many_queries_are_as_exact_as_mlx(
    mask: str | None, n: int, n_keys: int, heads: int, has_sinks: bool
) -> None:
    queries = 8 * noise(0, 1, heads, n, DIM)
    keys, values = (noise(part, 1, 2, n_keys + 5, DIM)[:, :, :n_keys] for part in (1, 2))
    sinks = 4 * noise(3, heads) if has_sinks else None
    seen = {"window": window(n, n_keys), None: mx.ones((n, n_keys), mx.bool_)}
    seen["causal"] = mx.arange(n_keys) <= mx.arange(n_keys - n, n_keys)[:, None]
    given = seen[mask] if mask == "window" else mask
    assert is_tiled(queries, keys, given)
    exact = exactly(queries, keys, values, seen[mask], sinks)
    errors = [
        np.abs(np.array(out) - exact).max()
        for out in (
            attend(queries, keys, values, None, 0.25, given, sinks),
            mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=0.25, mask=given, sinks=sinks
            ),
        )
    ]
    assert errors[0] < 3 * errors[1]


def test_queries_without_any_key_are_no_nan() -> None:
    queries = noise(0, 1, 2, 200, DIM)
    keys = noise(1, 1, 2, 300, DIM)
    mask = window(200, 300)
    mask[3] = False
    out = attend(queries, keys, keys, None, 0.25, mask)
    assert not mx.isnan(out).any().item()


def test_exponentials_are_those_of_numpy() -> None:
    exponents = np.concatenate([np.linspace(-40, 0, 100_001), [-50.0, -69.0]]).astype(np.float32)
    exact = np.exp(exponents.astype(np.float64))
    many = np.array(exponential(mx.array(exponents)))
    assert exponents.size >= N_MANY
    assert np.abs(many / exact - 1)[exponents > -1].max() < 4e-7
    assert np.abs(many / exact - 1).max() < 4e-6
    assert many[100_000] == pytest.approx(1, abs=2e-7)
    none = np.array(exponential(mx.array(np.full(N_MANY, -np.inf, np.float32))))
    assert (none < 1e-29).all() and (none >= 0).all()
