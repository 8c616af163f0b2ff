"""Check at load whether contexts can be cut and copied.

Caches of mlx-vlm's models and of some model files are of classes that the engine does not know, or
hold other than one entry for each token; some sparse attention depends on where a prompt was cut.
What is reused would answer otherwise without an error, so it is tried once.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxstack.engine.decode.batching_check import TOLERANCES, precision
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory, has_own_state, leaves
from mlxstack.engine.model.mlx_vlm_models import TextModel
from mlxstack.engine.model.runner import ModelRunner

log = logging.getLogger(__name__)

CUT = 21
N_TOKENS = 53
N_MORE = 3
"""Tokens fed one by one to the context and to its copies."""
TOLERANCE = 1e-2
"""Of the largest logit; copies compute the same."""


def is_uncertain(model: Any, cache_factory: CacheFactory) -> bool:
    """Whether copies of contexts must be checked.

    So it is where the model or its caches are of classes that the engine does not know.
    """
    return isinstance(model, TextModel) or any(map(has_own_state, leaves(cache_factory.make())))


def why_not_copied(runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int) -> str | None:
    """Why contexts cannot be copied; None where they can."""
    tokens = [(7 * i + 3) % n_vocab for i in range(N_TOKENS + N_MORE)]
    source = SlotContext(cache_factory)
    try:
        _feed(runner, source, tokens[:CUT])
        source.checkpoint()
        in_pieces = _feed(runner, source, tokens[CUT:N_TOKENS])
        at_once = _feed(runner, source.new_empty(), tokens[:N_TOKENS])
        whole = source.new_empty()
        n_whole = whole.fork_from(source, N_TOKENS)
        part = source.new_empty()
        n_part = part.fork_from(source, CUT)
        expected = _next(runner, source, tokens)
        found = [_next(runner, whole, tokens), _next(runner, part, tokens)]
        late = source.new_empty()
        late.fork_from(source, len(source))
        # Passes of single tokens may leave out a cache that longer passes read.
        expected_late = _feed(runner, source, tokens)
        found_late = _feed(runner, late, tokens)
    except Exception as error:
        raise_device_error(error)
        return f"its caches cannot be copied: {error or type(error).__name__}"
    if (n_whole, n_part) != (N_TOKENS, CUT):
        return "its caches can neither be cut nor kept as they are"
    pairs = [*((logits, expected) for logits in found), (found_late, expected_late)]
    if any(_differ(logits, other, TOLERANCE) for logits, other in pairs):
        return "a copy of its caches answers otherwise"
    if _differ(in_pieces, at_once, TOLERANCES[precision(runner.model)]):
        return "a prompt in pieces gets other logits than at once"
    return None


def _differ(logits: mx.array, expected: mx.array, tolerance: float) -> bool:
    return bool((mx.abs(logits - expected).max() > tolerance * mx.abs(expected).max()).item())


def _feed(runner: ModelRunner, context: SlotContext, tokens: Sequence[int]) -> mx.array:
    logits = runner.forward(mx.array([tokens]), context.caches)[0, -1]
    context.extend(tokens)
    context.evaluate()
    return logits


def _next(runner: ModelRunner, context: SlotContext, tokens: Sequence[int]) -> mx.array:
    """Logits (n, vocabulary) of the tokens after those of the context."""
    if len(context) < N_TOKENS:
        _feed(runner, context, tokens[len(context) : N_TOKENS])
    return mx.stack([_feed(runner, context, [token]) for token in tokens[N_TOKENS:]])
