"""Measures whether prompts that share a pass have their first tokens sooner."""

import time

import mlx.core as mx

from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.pass_layout import shortens_waits

LENGTHS = (16, 32, 64, 128)
N_PASSES = 3
"""Passes of each kind; the fastest counts, since the first may compile."""
MAX_S = 2.0
"""Seconds of measuring after which no longer prompts are tried."""


def max_shared_tokens(runner: ModelRunner, cache_factory: CacheFactory) -> int:
    """Tokens of the longest prompts that gain by sharing a pass; 0: none do."""
    until = time.perf_counter() + MAX_S
    step_s = _seconds(runner, cache_factory, 1, 1)
    longest = 0
    for n_tokens in LENGTHS:
        alone_s, shared_s = (_seconds(runner, cache_factory, n, n_tokens) for n in (1, 2))
        if not shortens_waits(alone_s, shared_s, step_s):
            break
        longest = n_tokens
        if time.perf_counter() > until:
            break
    return longest


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
