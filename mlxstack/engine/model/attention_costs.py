"""Measures attention over a shared prefix: read per row, or once."""

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlxstack.engine.decode.row_views import RaggedArray
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.attention_patch import attend
from mlxstack.engine.model.cache_factory import CacheFactory
from mlxstack.engine.model.prefixed_cache import PrefixedArray
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.live_sharing import SharingCosts

LENGTHS = (1024, 2048, 4096, 8192)
N_TAIL = 128
N_ROWS = 2
N_TRIES = 5
"""Alternating tries; the fastest counts, since the first may compile."""

HEADS = ("n_heads", "num_heads", "num_attention_heads")
"""Names of the head count in mlx-lm's attention modules."""


def measure_sharing(runner: ModelRunner, maker: CacheFactory) -> list[SharingCosts]:
    """Attention seconds of a sharable layer by prefix length; empty without."""
    caches = maker.make()
    mx.eval(runner.execute([SlotTokens(caches, mx.array([0, 0]))]))
    leaf = next(filter(cache_adapters.can_share, cache_adapters.leaves(caches)), None)
    if leaf is None:
        return []
    keys, values = cache_adapters.first_tokens(leaf, 1)
    n_heads = max(keys.shape[1], next(_heads(runner.model), 0))
    queries = mx.random.normal((N_ROWS, n_heads, 1, keys.shape[3])).astype(keys.dtype)
    return [_measured(queries, keys, values, n) for n in LENGTHS]


def _measured(queries: mx.array, keys: mx.array, values: mx.array, n_tokens: int) -> SharingCosts:
    shared = [_noise(like, n_tokens) for like in (keys, values)]
    rows = [[_noise(like, N_TAIL) for like in (keys, values)] for _ in range(N_ROWS)]
    split = [
        RaggedArray([PrefixedArray(shared[i], row[i]) for row in rows]) for i in range(len(shared))
    ]
    whole = [
        RaggedArray([mx.concatenate([shared[i], row[i]], axis=2) for row in rows])
        for i in range(len(shared))
    ]
    mx.eval(shared, rows, *(each.arrays for each in whole))
    scale = queries.shape[-1] ** -0.5
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(N_TRIES):
        for taken, (all_keys, all_values) in zip(times, (whole, split), strict=True):
            began = time.perf_counter()
            mx.eval(attend(queries, all_keys, all_values, None, scale, None))
            taken.append(time.perf_counter() - began)
    return SharingCosts(n_tokens, min(times[0]), min(times[1]))


def _noise(like: mx.array, n_tokens: int) -> mx.array:
    heads, dim = like.shape[1], like.shape[3]
    return mx.random.normal((1, heads, n_tokens, dim)).astype(like.dtype)


def _heads(model: Any) -> Iterator[int]:
    for _, module in model.named_modules():
        yield from (getattr(module, name) for name in HEADS if hasattr(module, name))
