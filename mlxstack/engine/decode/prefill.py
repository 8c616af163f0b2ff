"""Chunked prefill: next chunk of a prompt in its slot."""

import time

from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters

RESERVE = 512
"""Tokens for which room is made beside a prompt: the beginning of its answer."""


def room_for(request: Request) -> int:
    """Tokens of KV allocated for prompt and first response tokens."""
    return cache_adapters.in_steps(len(request.tokens) + min(request.max_tokens, RESERVE))


def prefill_chunk(
    batch: Batch, context: SlotContext, request: Request, n_tokens: int, input_s: float = 0.0
) -> float:
    """Prefill at most `n_tokens` of the prompt; returns the seconds.

    It ends earlier where a checkpoint is worth taking, and takes it there. A proposer that
    needs the hidden states gets them. Where inputs of the tokens are missing, some are computed in
    place of the chunk, for `input_s` seconds. Raises what `TokenInputs` raises.
    """
    inputs = batch.inputs
    start = len(context)
    end = min(start + n_tokens, _next_stop(context, request, start))
    end = inputs.chunk_end(request, start, end)
    began = time.perf_counter()
    if not inputs.prepare(request, start, end, input_s):
        return time.perf_counter() - began
    context.reserve(room_for(request))
    plan = [inputs.slot_tokens(context.caches, request, start, end)]
    if batch.proposer.needs_states:
        states = batch.runner.states(plan)
        ids = inputs.vocabulary_ids(request.tokens[start : end + 1])
        batch.proposer.observe_prefill(context, start, states, ids)
    else:
        batch.runner.execute(plan)
    context.evaluate()
    took = time.perf_counter() - began
    context.extend_to(request, end)
    inputs.note_prefilled(request, end)
    if end in request.checkpoint_positions or end == len(request.tokens) - 1:
        context.checkpoint()
    return took


def row_of(batch: Batch, request: Request, slot: int, context: SlotContext, n_ctx: int) -> BatchRow:
    """The row of a request, computed but for its last token.

    Its answer ends at the latest when prompt and answer are `n_ctx` tokens. Raises what
    `TokenInputs.shift` raises.
    """
    tokens = request.tokens
    shift = batch.inputs.shift(request)
    text = batch.inputs.text(request)
    state = request.constraint.start() if request.constraint else None
    sampler = Sampler(request.sampling, text, time.monotonic_ns(), state)
    n_left = max(1, min(request.max_tokens, n_ctx - len(tokens)))
    source = batch.proposer.start(request, text)
    return BatchRow(slot, context, sampler, tokens[-1], n_left, source, shift, request.id)


def _next_stop(context: SlotContext, request: Request, start: int) -> int:
    """Latest end of a prefill chunk: checkpoint position or prompt end."""
    end = len(request.tokens) - 1
    stops = [context.quantized_start]
    if not context.is_sliceable:
        stops += request.checkpoint_positions
    return min((stop for stop in stops if start < stop < end), default=end)
