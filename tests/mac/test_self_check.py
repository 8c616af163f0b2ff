"""The self-check in half precision: rounding switches no batching off, faults still do.

A CPU rounds a batch as it rounds a row, and cannot multiply experts in half precision at all. So
the rounding of a GPU is imitated: the output of each layer gets seeded noise of the size of half
precision, different for each shape of a batch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode.batching_check import BatchingCheck, self_check
from mlxstack.engine.model.cache_adapters import CacheFactory
from tests.models import CONFIGS, HYBRID, LATENT, LLAMA, SLIDING, VOCAB, _spread
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.metal]

ROUNDING = {mx.float16: 2**-11, mx.bfloat16: 2**-8}


def by_turns(names: Iterable[str], *more: Any) -> list[Any]:
    """Arguments of each name with one of both precisions; those with the other in `make soak`."""
    both = [[(name, dtype, *more) for dtype in ROUNDING] for name in names]
    first = [pair[n % 2] for n, pair in enumerate(both)]
    return [*first, *in_soak(*(pair[1 - n % 2] for n, pair in enumerate(both)))]


CASES = [
    *by_turns(CONFIGS, 0),
    # Of 40 seeds those in which a token goes to another expert in the batch.
    ("tiny-mla", mx.float16, 39),
    ("tiny-mla", mx.bfloat16, 16),
    ("tiny-hybrid", mx.bfloat16, 6),
    ("tiny-hybrid", mx.bfloat16, 10),
    ("tiny-hybrid", mx.bfloat16, 27),
]

DENSE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "sliding window": SLIDING,
    "MLA": LATENT | {"first_k_dense_replace": LATENT["num_hidden_layers"]},
    "hybrid": HYBRID | {"num_experts": 0},
}


def made(config: dict[str, Any], dtype: mx.Dtype = mx.float32, seed: int = 0) -> Any:
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda a: _spread(a).astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def rounding(model: Any, dtype: mx.Dtype, seed: int) -> Any:
    """The model as a GPU computes it in this precision, which rounds by the shape of a batch."""
    for i, layer in enumerate(model.layers):
        layer.__class__ = rounded(type(layer), ROUNDING[dtype], 1000 * seed + i)
    model.of_this_precision = mx.zeros(1, dtype)
    return model


def rounded(base: Any, epsilon: float, seed: int) -> Any:
    def call(self: Any, x: mx.array, *positional: Any, **more: Any) -> Any:
        out = base.__call__(self, x, *positional, **more)
        key = mx.random.key(seed + 100 * x.shape[0] + 10_000 * x.shape[1])
        return out * (1 + epsilon * mx.random.normal(out.shape, key=key))

    return type(base.__name__, (base,), {"__call__": call})


def verdict_of(model: Any) -> BatchingCheck:
    return self_check(model, CacheFactory(model, KVSpec()), VOCAB)


@pytest.mark.parametrize(("kind", "dtype", "seed"), CASES, ids=str)
def test_rounding_switches_no_batching_off(kind: str, dtype: mx.Dtype, seed: int) -> None:
    model = rounding(made(CONFIGS[kind], seed=seed), dtype, seed)
    assert verdict_of(model).why_not is None


@pytest.mark.parametrize(("kind", "dtype"), by_turns(DENSE), ids=str)
def test_a_dense_model_in_half_precision_is_batched(kind: str, dtype: mx.Dtype) -> None:
    """Experts are left out: MLX multiplies them on a CPU in float32 only."""
    assert verdict_of(made(DENSE[kind], dtype)).why_not is None


class Faulty:
    """A model whose logits a batch changes by `fault`; alone it is as it was."""

    def __init__(self, model: Any, fault: Callable[[mx.array], mx.array]) -> None:
        self.model = model
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        return self.fault(logits) if tokens.shape == (3, 1) else logits


FAULTS: dict[str, Callable[[mx.array], mx.array]] = {
    "rows are mixed up": lambda logits: logits[::-1],
    "one row is lost": lambda logits: mx.concatenate([logits[:2], mx.zeros_like(logits[:1])]),
    "one row is no number": lambda logits: logits * mx.array([1, 1, float("nan")])[:, None, None],
    "one row is scaled": lambda logits: logits * mx.array([1.0, 1.0, 2.0])[:, None, None],
}


@pytest.mark.parametrize(("fault", "dtype"), by_turns(FAULTS), ids=str)
def test_a_fault_is_found_beneath_the_rounding(fault: str, dtype: mx.Dtype) -> None:
    model = Faulty(rounding(made(CONFIGS["tiny-sinks"]), dtype, 1), FAULTS[fault])
    reason = verdict_of(model).why_not
    assert reason is not None
    assert "differ from alone" in reason


def test_logits_that_are_no_numbers_are_named() -> None:
    model = made(LLAMA)
    model.model.norm.weight = model.model.norm.weight * float("nan")
    check = verdict_of(model)
    assert not check.is_batching
    assert check.why_not is not None
    assert "NaN" in check.why_not


def test_in_float32_a_small_difference_is_a_fault() -> None:
    model = Faulty(made(LLAMA), lambda logits: logits * mx.array([1.0, 1.0, 1.05])[:, None, None])
    assert not verdict_of(model).is_batching
