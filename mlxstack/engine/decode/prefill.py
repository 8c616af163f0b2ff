"""Prefills a bite: the next piece of a prompt, on the slot's own caches; then a row decodes."""

import time

import mlx.core as mx

from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters

RESERVE = 512
"""Tokens for which room is made beside a prompt: the beginning of its answer."""


def room_for(request: Request) -> int:
    """Tokens of KV that are allocated for the prompt and the beginning of its answer."""
    return cache_adapters.in_steps(len(request.tokens) + min(request.max_tokens, RESERVE))


def prefill_chunk(model: object, context: SlotContext, request: Request, n_tokens: int) -> float:
    """Extend the context by at most `n_tokens` of the prompt; seconds until it was computed.

    It ends earlier where a checkpoint is worth taking, and takes it there.
    """
    start = len(context)
    end = min(start + n_tokens, _next_stop(context, request, start))
    tokens = request.tokens[start:end]
    began = time.perf_counter()
    context.reserve(room_for(request))
    model(mx.array([tokens]), cache=context.caches)  # type: ignore[operator]
    context.evaluate()
    took = time.perf_counter() - began
    context.extend(tokens)
    if end in request.checkpoint_positions or end == len(request.tokens) - 1:
        context.checkpoint()
    return took


def row_of(request: Request, slot: int, context: SlotContext) -> BatchRow:
    """The row of an ask whose prompt is computed but for its last token."""
    state = request.constraint.start() if request.constraint else None
    chooser = Sampler(request.sampling, request.tokens, time.monotonic_ns(), state)
    return BatchRow(slot, context, chooser, request.tokens[-1], request.max_tokens)


def _next_stop(context: SlotContext, request: Request, start: int) -> int:
    """Where a bite has to end at the latest: the next point worth a checkpoint, or the end."""
    end = len(request.tokens) - 1
    stops = [context.quantized_start]
    if not context.is_sliceable:
        stops += request.checkpoint_positions
    return min((stop for stop in stops if start < stop < end), default=end)
