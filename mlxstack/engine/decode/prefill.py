"""Chunked prefill: next chunks of prompts in their slots."""

import time
from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.runner import SlotTokens

RESERVE = 512
"""Tokens for which room is made beside a prompt: the beginning of its answer."""


def room_for(request: Request) -> int:
    """Tokens of KV allocated for prompt and first response tokens."""
    return cache_adapters.in_steps(len(request.tokens) + min(request.max_tokens, RESERVE))


class PreparedChunk(Struct, frozen=True):
    """Tokens of a prompt for a pass; none where inputs are missing."""

    context: SlotContext
    request: Request
    span: range
    tokens: SlotTokens | None


def prefill_chunk(
    batch: Batch, context: SlotContext, request: Request, n_tokens: int, input_s: float = 0.0
) -> float:
    """Prefill at most `n_tokens` of the prompt; returns the seconds.

    See `prepare_chunk`, whose errors it raises.
    """
    began = time.perf_counter()
    compute_chunks(batch, [prepare_chunk(batch, context, request, n_tokens, input_s)])
    return time.perf_counter() - began


def prepare_chunk(
    batch: Batch, context: SlotContext, request: Request, n_tokens: int, input_s: float = 0.0
) -> PreparedChunk:
    """Prepare at most `n_tokens` of the prompt for a pass.

    It ends where a checkpoint is worth taking. Where inputs of the tokens are missing, some are
    computed in place of the chunk, for `input_s` seconds. Raises what `TokenInputs` raises.
    """
    inputs = batch.inputs
    start = len(context)
    end = min(start + n_tokens, _next_stop(context, request, start))
    end = inputs.chunk_end(request, start, end)
    if not inputs.prepare(request, start, end, input_s):
        return PreparedChunk(context, request, range(start, start), None)
    context.reserve(room_for(request))
    tokens = inputs.slot_tokens(context.caches, request, start, end)
    return PreparedChunk(context, request, range(start, end), tokens)


def compute_chunks(batch: Batch, chunks: Sequence[PreparedChunk]) -> None:
    """Compute chunks of different prompts in one pass.

    Checkpoints are taken at their ends. A proposer that needs the hidden states gets them.
    """
    plan = [chunk.tokens for chunk in chunks if chunk.tokens is not None]
    if not plan:
        return
    chunks = [chunk for chunk in chunks if chunk.tokens is not None]
    if batch.proposer.needs_states:
        ends = list(accumulate(len(chunk.span) for chunk in chunks))[:-1]
        states = mx.split(batch.runner.states(plan), ends)
        for chunk, own in zip(chunks, states, strict=True):
            tokens = chunk.request.tokens[chunk.span.start : chunk.span.stop + 1]
            ids = batch.inputs.vocabulary_ids(tokens)
            batch.proposer.observe_prefill(chunk.context, chunk.span.start, own, ids)
    else:
        batch.runner.execute(plan)
    for chunk in chunks:
        chunk.context.evaluate()
    for chunk in chunks:
        _note_computed(batch, chunk)


def _note_computed(batch: Batch, chunk: PreparedChunk) -> None:
    context = chunk.context
    request = chunk.request
    end = chunk.span.stop
    context.extend_to(request, end)
    batch.inputs.note_prefilled(request, end)
    if end in request.checkpoint_positions or end == len(request.tokens) - 1:
        context.checkpoint()


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
