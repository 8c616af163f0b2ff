"""Measures forward passes by width in tokens."""

import time

import mlx.core as mx

from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.pass_layout import WidthCosts

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
N_PASSES = 3
"""Passes per width; the fastest counts, since the first may compile."""


def measure_widths(runner: ModelRunner, cache_factory: CacheFactory) -> WidthCosts:
    """Seconds of one slot's pass by width, which later steps correct."""
    return WidthCosts(WIDTHS, tuple(pass_seconds(runner, cache_factory, n) for n in WIDTHS))


def pass_seconds(runner: ModelRunner, cache_factory: CacheFactory, n_tokens: int) -> float:
    """Seconds of one slot's pass over `n_tokens`."""
    caches = cache_factory.make()
    example = runner.example(n_tokens)
    taken = []
    for _ in range(N_PASSES):
        began = time.perf_counter()
        mx.eval(runner.execute([SlotTokens(caches, example)]))
        taken.append(time.perf_counter() - began)
    return min(taken)
