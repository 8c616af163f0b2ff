"""Measures up to which length prompts gain by sharing a pass."""

import time
from collections.abc import Iterator

import mlx.core as mx

from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.pass_layout import PassLayout, SharedPrompts, SharingCosts, max_shared

LENGTHS = (16, 32, 64, 128)
N_PASSES = 3
"""Passes of each kind; the fastest counts, since the first may compile."""
MAX_S = 2.0
"""Seconds of measuring after which no longer prompts are tried."""


def measure_sharing(runner: ModelRunner, cache_factory: CacheFactory) -> SharedPrompts:
    """Prompts that gain by sharing a pass."""
    step_s = _seconds(runner, cache_factory, 1, 1)
    is_padded = runner.layout(cache_factory.make()) is PassLayout.PADDED
    return SharedPrompts(max_shared(_costs(runner, cache_factory), step_s), is_padded)


def _costs(runner: ModelRunner, cache_factory: CacheFactory) -> Iterator[SharingCosts]:
    until = time.perf_counter() + MAX_S
    for n_tokens in LENGTHS:
        if time.perf_counter() > until:
            return
        alone_s, shared_s = (_seconds(runner, cache_factory, n, n_tokens) for n in (1, 2))
        yield SharingCosts(n_tokens, alone_s, shared_s)


def _seconds(
    runner: ModelRunner, cache_factory: CacheFactory, n_prompts: int, n_tokens: int
) -> float:
    """Seconds of a pass over the first tokens of so many prompts."""
    tokens = runner.example(n_tokens)
    taken = []
    for _ in range(N_PASSES):
        caches = [cache_factory.make() for _ in range(n_prompts)]
        began = time.perf_counter()
        runner.execute([SlotTokens(own, tokens, n_prefill=n_tokens) for own in caches])
        mx.eval([leaf.state for own in caches for leaf in cache_adapters.leaves(own)])
        taken.append(time.perf_counter() - began)
    return min(taken)
