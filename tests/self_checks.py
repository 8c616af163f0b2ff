"""The engine's self-check, run once per process for each model, cache precision and vocabulary.

Engines of the tests load the same few models again and again, and the check is most of such a
start. Its own tests, and those of each kind of model, call it directly.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from xxhash import xxh3_128_hexdigest

from mlxstack.engine.decode.batching_check import BatchingCheck, self_check
from mlxstack.engine.model.cache_factory import CacheFactory

_verdicts: dict[tuple[object, ...], BatchingCheck] = {}


def remembered_check(model: Any, maker: CacheFactory, n_vocab: int) -> BatchingCheck:
    """The verdict of `self_check` on a model of these weights; an error is not remembered."""
    weights = tuple(
        (name, weight.shape, weight.dtype, _digest(weight))
        for name, weight in tree_flatten(model.parameters())
    )
    # The class of a model in a file of its own is another one at each load.
    key = (type(model), repr(getattr(model, "args", None)), weights, repr(maker._kv), n_vocab)
    if key not in _verdicts:
        _verdicts[key] = self_check(model, maker, n_vocab)
    return _verdicts[key]


def _digest(weight: mx.array) -> str:
    return xxh3_128_hexdigest(memoryview(mx.contiguous(mx.atleast_1d(weight)).view(mx.uint8)))
