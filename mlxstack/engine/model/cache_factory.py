"""Makes a slot's caches in the preset's KV precision."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlxstack.core.preset import KVSpec
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.runner import Example, ModelRunner, SlotTokens, zeros


class CacheFactory:
    """Caches for one model and one KV precision.

    With `quantized_start` > 0 a context keeps 16-bit KV until it reaches that many tokens, and
    all of it is quantized then.
    """

    def __init__(self, model: Any, kv: KVSpec) -> None:
        self._model = model
        self._kv = kv
        self.quantized_start = kv.quantized_start if kv.bits < 16 else 0
        """Position of KV quantization; 0: never, or from the first token."""

    def make(self, n_tokens: int = 0) -> list[Any]:
        """Empty caches of the kinds that a context of `n_tokens` has."""
        caches: list[Any] = make_prompt_cache(self._model)
        is_due = self._kv.bits < 16 and n_tokens >= self._kv.quantized_start
        return self.quantize(caches) if is_due else caches

    def quantize(self, caches: list[Any]) -> list[Any]:
        """The caches with full-attention KV quantized; other kinds as they are."""
        return cache_adapters.map_leaves(caches, self._quantize)

    def _quantize(self, cache: Any) -> Any:
        if type(cache) is not KVCache:
            return cache
        group_size, bits = self._kv.group_size, self._kv.bits
        if cache.empty():
            return QuantizedKVCache(group_size=group_size, bits=bits)
        return cache.to_quantized(group_size=group_size, bits=bits)


def kv_bytes_per_token(
    runner: ModelRunner, cache_factory: CacheFactory, example: Example = zeros
) -> int:
    """Bytes that one token adds to the layers that keep every token."""
    caches = cache_factory.make(cache_factory.quantized_start)
    runner.execute([SlotTokens(caches, example(2))])
    leaves = [leaf for leaf in cache_adapters.leaves(caches) if cache_adapters.is_sliceable(leaf)]
    return sum(part.nbytes for leaf in leaves for part in cache_adapters.span(leaf, 0, 1))


def describe(caches: list[Any]) -> str:
    """Kind, heads, dims and dtype of every layer's filled cache."""
    return ";".join(
        f"{type(leaf).__name__}:" + ",".join(_shape(a) for _, a in tree_flatten(leaf.state))
        for leaf in cache_adapters.leaves(caches)
    )


def _shape(value: Any) -> str:
    if not isinstance(value, mx.array):
        return ""
    dims = [n for axis, n in enumerate(value.shape) if axis != value.ndim - 2]
    return f"{dims}{value.dtype}"
