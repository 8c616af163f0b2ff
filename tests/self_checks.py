"""The engine's self-check, run once for each model, cache precision and vocabulary.

Engines of the tests load the same few models again and again, and the check is most of such a
start. Its own tests, and those of each kind of model, call it directly.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from xxhash import xxh3_128_hexdigest

from mlxstack.engine.decode.batching_check import BatchingCheck, self_check
from mlxstack.engine.model.cache_adapters import CacheFactory
from tests.remembered import remembered


def remembered_check(model: Any, maker: CacheFactory, n_vocab: int) -> BatchingCheck:
    """The verdict of `self_check` on a model of these weights; an error is not remembered."""
    kind = type(model)
    # A class in a file of the model is another one in each folder. Passes of a model that is
    # divided between ranks are collectives: none may be left out.
    if not kind.__module__.startswith("mlx_lm.models.") or is_divided(model):
        return self_check(model, maker, n_vocab)
    weights = tuple(
        (name, weight.shape, str(weight.dtype), _digest(weight))
        for name, weight in tree_flatten(model.parameters())
    )
    args = repr(getattr(model, "args", None))
    question = kind.__module__, args, weights, repr(maker._kv), n_vocab
    return remembered(question, BatchingCheck, lambda: self_check(model, maker, n_vocab))


def is_divided(model: Any) -> bool:
    """Whether other ranks have parts of this model."""
    names = (type(module).__name__ for _, module in model.named_modules())
    stages = getattr(getattr(model, "model", None), "pipeline_size", 1)
    return stages > 1 or any("Sharded" in name for name in names)


def _digest(weight: mx.array) -> str:
    return xxh3_128_hexdigest(memoryview(mx.contiguous(mx.atleast_1d(weight)).view(mx.uint8)))
