"""Chunked prefill: next chunk of a prompt in its slot."""

import time
from collections.abc import Sequence

import mlx.core as mx

from mlxstack.core.image import text_tokens
from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import BatchRow
from mlxstack.engine.decode.draft_model import DraftModel
from mlxstack.engine.decode.drafter import Drafter
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.decode.sibling_answers import SiblingAnswers
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.runner import ModelRunner, SlotTokens

RESERVE = 512
"""Tokens for which room is made beside a prompt: the beginning of its answer."""


def room_for(request: Request) -> int:
    """Tokens of KV allocated for prompt and first response tokens."""
    return cache_adapters.in_steps(len(request.tokens) + min(request.max_tokens, RESERVE))


def prefill_chunk(
    runner: ModelRunner,
    context: SlotContext,
    request: Request,
    n_tokens: int,
    draft_model: DraftModel | None = None,
) -> float:
    """Prefill at most `n_tokens` of the prompt; returns the seconds.

    It ends earlier where a checkpoint is worth taking, and takes it there. A draft model that
    needs the hidden states gets them.
    """
    start = len(context)
    end = min(start + n_tokens, _next_stop(context, request, start))
    tokens = request.tokens[start:end]
    began = time.perf_counter()
    context.reserve(room_for(request))
    plan = [SlotTokens(context.caches, mx.array(tokens))]
    if draft_model is not None and draft_model.target is not None:
        states = runner.states(plan)
        draft_model.follow_prefill(context, start, states, request.tokens[start : end + 1])
    else:
        runner.execute(plan)
    context.evaluate()
    took = time.perf_counter() - began
    context.extend(tokens)
    if end in request.checkpoint_positions or end == len(request.tokens) - 1:
        context.checkpoint()
    return took


def row_of(
    request: Request,
    slot: int,
    context: SlotContext,
    n_ctx: int,
    drafter: Drafter | None,
) -> BatchRow:
    """The row of a request whose prompt is computed but for its last token.

    Its answer ends at the latest when prompt and answer are `n_ctx` tokens.
    """
    tokens = request.tokens
    state = request.constraint.start() if request.constraint else None
    sampler = Sampler(request.sampling, _text_of(request), time.monotonic_ns(), state)
    n_left = max(1, min(request.max_tokens, n_ctx - len(tokens)))
    return BatchRow(slot, context, sampler, tokens[-1], n_left, drafter)


def drafter_of(request: Request, siblings: SiblingAnswers) -> Drafter:
    """Drafter of a request, over prompt, prediction and sibling responses."""
    answers = siblings.of(request)
    find_sibling = answers.place if answers is not None else None
    return Drafter(_text_of(request), request.eos, request.prediction, find_sibling)


def _text_of(request: Request) -> Sequence[int]:
    """Tokens of the prompt without those of images."""
    return text_tokens(request.tokens) if request.images else request.tokens


def _next_stop(context: SlotContext, request: Request, start: int) -> int:
    """Latest end of a prefill chunk: checkpoint position or prompt end."""
    end = len(request.tokens) - 1
    stops = [context.quantized_start]
    if not context.is_sliceable:
        stops += request.checkpoint_positions
    return min((stop for stop in stops if start < stop < end), default=end)
