"""Measures attention over a shared prefix: read per row, or once."""

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlxstack.engine.decode.attention_patch import attend
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.prefixed_cache import PrefixedArray
from mlxstack.engine.model.row_views import RaggedArray
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.kv.shared_prefixes import SharingCosts

LENGTHS = (1024, 2048, 4096, 8192)
N_TAIL = 128
N_ROWS = 2
N_TRIES = 5
"""Alternating tries; the fastest counts, since the first may compile."""

HEADS = ("n_heads", "num_heads", "num_attention_heads")
"""Names of the head count in mlx-lm's attention modules."""


def measure_sharing(runner: ModelRunner, cache_factory: CacheFactory) -> list[SharingCosts]:
    """Attention seconds of a sharable layer by prefix length; empty without."""
    caches = cache_factory.make()
    mx.eval(runner.execute([SlotTokens(caches, mx.array([0, 0]))]))
    leaf = next(filter(cache_adapters.is_sliceable, cache_adapters.leaves(caches)), None)
    if leaf is None:
        return []
    like = leaf.keys
    dim = like.shape[3] if isinstance(like, mx.array) else like[0].shape[3] * 32 // leaf.bits
    dtype = like.dtype if isinstance(like, mx.array) else like[1].dtype
    n_heads = n_query_heads(runner.model, leaf)
    queries = mx.random.normal((N_ROWS, n_heads, 1, dim)).astype(dtype)
    return [_measured(queries, leaf, n) for n in LENGTHS]


def _measured(queries: mx.array, leaf: Any, n_tokens: int) -> SharingCosts:
    shared = _noise(leaf, n_tokens, 0)
    rows = [_noise(leaf, N_TAIL, 1 + i) for i in range(N_ROWS)]
    split = [
        RaggedArray([PrefixedArray(shared[i], row[i]) for row in rows]) for i in range(len(shared))
    ]
    whole = [RaggedArray([one.joined() for one in each.arrays]) for each in split]
    mx.eval(shared, rows, *(each.arrays for each in whole))
    scale = queries.shape[-1] ** -0.5
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(N_TRIES):
        for taken, (all_keys, all_values) in zip(times, (whole, split), strict=True):
            began = time.perf_counter()
            mx.eval(attend(queries, all_keys, all_values, None, scale, None))
            taken.append(time.perf_counter() - began)
    return SharingCosts(n_tokens, min(times[0]), min(times[1]))


def _noise(leaf: Any, n_tokens: int, seed: int) -> Any:
    """Random keys and values as this cache holds them."""
    cache = cache_adapters.prefixed(leaf, None, 1)
    cache_adapters.extend_room(cache, n_tokens - 1, seed)
    return cache.keys_and_values()


def n_query_heads(model: Any, leaf: Any) -> int:
    """Query heads of the model, or KV heads of a nonempty cache."""
    return int(max(cache_adapters.parts_of(leaf)[0].shape[1], next(_heads(model), 0)))


def _heads(model: Any) -> Iterator[int]:
    for _, module in model.named_modules():
        yield from (getattr(module, name) for name in HEADS if hasattr(module, name))
