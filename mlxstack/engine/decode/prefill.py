"""Chunked prefill: next chunk of a prompt in its slot."""

import time
from collections.abc import Sequence

import mlx.core as mx

from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.prompt_tokens import (
    check_images,
    kept,
    text_tokens,
    whole_images,
    without_virtual,
)
from mlxstack.core.request import Request
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.runner import SlotTokens
from mlxstack.engine.vision.encoder import ImageEncoder

ENDS_WITH_IMAGE = "the prompt ends with an image; text must follow it"
RESERVE = 512
"""Tokens for which room is made beside a prompt: the beginning of its answer."""


def room_for(request: Request) -> int:
    """Tokens of KV allocated for prompt and first response tokens."""
    return cache_adapters.in_steps(len(request.tokens) + min(request.max_tokens, RESERVE))


def prefill_chunk(
    batch: Batch, context: SlotContext, request: Request, n_tokens: int, encode_s: float = 0.0
) -> float:
    """Prefill at most `n_tokens` of the prompt; returns the seconds.

    It ends earlier where a checkpoint is worth taking, and takes it there. A proposer that
    needs the hidden states gets them. Where the features of an image are missing, blocks of its
    tower are computed in place of tokens, for `encode_s` seconds. Raises Unsupported.
    """
    runner = batch.runner
    images = batch.images
    start = len(context)
    end = min(start + n_tokens, _next_stop(context, request, start))
    if images is not None and images.image_model.is_bidirectional:
        end = whole_images(request.images, start, end)
        if end == len(request.tokens):
            raise BadRequest(ENDS_WITH_IMAGE)
    tokens = request.tokens[start:end]
    began = time.perf_counter()
    if request.images and _is_encoding(images, request, start, end, encode_s):
        return time.perf_counter() - began
    context.reserve(room_for(request))
    plan = [_slot_tokens(images, context, request, start, end)]
    if batch.proposer.needs_states:
        states = runner.states(plan)
        known = request.tokens[start : end + 1]
        if images is not None and request.images:
            known = tuple(without_virtual(known, images.image_model.placeholder))
        batch.proposer.observe_prefill(context, start, states, known)
    else:
        runner.execute(plan)
    context.evaluate()
    took = time.perf_counter() - began
    context.extend(tokens, kept(request, start, end).images)
    if images is not None and any(image.end == end for image in request.images):
        images.release(request.id)
    if end in request.checkpoint_positions or end == len(request.tokens) - 1:
        context.checkpoint()
    return took


def _is_encoding(
    images: ImageEncoder | None, request: Request, start: int, end: int, seconds: float
) -> bool:
    """Whether the chunk waits for an image, whose tower has run now."""
    touched = [image for image in request.images if image.start < end and start < image.end]
    if touched and images is None:
        raise Unsupported("this model takes no images; send text")
    for image in touched:
        if images is not None and not images.has(image):
            images.work(request.id, image, seconds)
            return not images.has(image)
    return False


def _slot_tokens(
    images: ImageEncoder | None, context: SlotContext, request: Request, start: int, end: int
) -> SlotTokens:
    tokens = request.tokens[start:end]
    if images is None or not request.images:
        # MLX reads beyond the embedding for an id without a row.
        check_images(tokens, ())
        n_prefill = len(request.tokens) - 1
        return SlotTokens(context.caches, mx.array(tokens), n_prefill=n_prefill)
    return images.slot_tokens(context.caches, tokens, start, request.images)


def row_of(batch: Batch, request: Request, slot: int, context: SlotContext, n_ctx: int) -> BatchRow:
    """The row of a request, computed but for its last token.

    Its answer ends at the latest when prompt and answer are `n_ctx` tokens. Raises BadRequest for
    a prompt that ends with an image, whose features no row can bring.
    """
    tokens = request.tokens
    if tokens[-1] >= FIRST_VIRTUAL:
        raise BadRequest(ENDS_WITH_IMAGE)
    state = request.constraint.start() if request.constraint else None
    text = _text_of(request)
    sampler = Sampler(request.sampling, text, time.monotonic_ns(), state)
    images = batch.images
    source = batch.proposer.start(request, text)
    n_left = max(1, min(request.max_tokens, n_ctx - len(tokens)))
    shift = images.image_model.shift(request.images, len(tokens)) if images is not None else 0
    return BatchRow(slot, context, sampler, tokens[-1], n_left, source, shift, request.id)


def _text_of(request: Request) -> Sequence[int]:
    """Tokens of the prompt without those of images."""
    if request.images:
        return text_tokens(request.tokens)
    return request.tokens


def _next_stop(context: SlotContext, request: Request, start: int) -> int:
    """Latest end of a prefill chunk: checkpoint position or prompt end."""
    end = len(request.tokens) - 1
    stops = [context.quantized_start, *(image.end for image in request.images)]
    if not context.is_sliceable:
        stops += request.checkpoint_positions
    return min((stop for stop in stops if start < stop < end), default=end)
