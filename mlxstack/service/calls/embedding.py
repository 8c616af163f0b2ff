"""Embeds texts as vectors."""

import asyncio
from array import array
from collections.abc import Sequence
from math import sqrt

from msgspec import Struct

from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.engine.embedding_engine import Tokens, batches
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.prompt.prompt import CHARS_PER_TOKEN, MIN_COUNTED_CHARS, TokenizeOptions

MAX_TEXTS = 2048
"""Limit of OpenAI."""

Text = str | Sequence[int | str]


class EmbeddingResult(Struct, frozen=True):
    """Normalized vectors as little-endian float32, and the number of tokens."""

    vectors: tuple[bytes, ...]
    n_tokens: int


async def embed(
    service: Service, texts: Sequence[Text], dimensions: int | None, *, is_cut: bool = False
) -> EmbeddingResult:
    """One vector per text; `dimensions` truncates and normalizes again.

    With `is_cut` a text that is too long loses its end. Raises BadRequest and TooLong for what
    cannot be embedded, Unsupported on a chat model.
    """
    if not 0 < len(texts) <= MAX_TEXTS:
        raise BadRequest(f"input has {len(texts)} texts; it must have 1 to {MAX_TEXTS}", "input")
    text_processor = service.text_processor
    tokens = tuple([await _tokens(service, text_processor, text, is_cut) for text in texts])
    vectors = await _vectors(service, text_processor, tokens)
    n_numbers = len(vectors[0]) // 4
    if dimensions is not None and not 0 < dimensions <= n_numbers:
        raise BadRequest(f"dimensions is {dimensions}; this model has {n_numbers}", "dimensions")
    if dimensions is not None:
        vectors = tuple(shortened(vector, dimensions) for vector in vectors)
    return EmbeddingResult(vectors, sum(len(row) for row in tokens))


def numbers(vector: bytes) -> list[float]:
    """A vector as Python's numbers."""
    return array("f", vector).tolist()


def shortened(vector: bytes, dimensions: int) -> bytes:
    """First numbers of a vector, normalized again, as Matryoshka embeddings are cut."""
    shortened = numbers(vector)[:dimensions]
    length = sqrt(sum(x * x for x in shortened)) or 1.0
    return array("f", [x / length for x in shortened]).tobytes()


async def _vectors(
    service: Service, text_processor: TextProcessor, texts: Sequence[Tokens]
) -> tuple[bytes, ...]:
    """Vectors batch by batch, between other requests; cancellation skips the rest."""
    vectors: dict[int, bytes] = {}
    with service.sleep.request():
        for batch in batches([len(text) for text in texts]):
            service.require_model(text_processor)
            engine = service.embedder
            part = tuple(texts[index] for index in batch)
            embedded = await asyncio.wrap_future(engine.embed(part))
            vectors |= dict(zip(batch, embedded, strict=True))
    return tuple(vectors[index] for index in range(len(texts)))


async def _all_tokens(text_processor: TextProcessor, text: Text) -> Tokens:
    if isinstance(text, str):
        spelling = TokenizeOptions(add_special=True, parse_special=False)
        tokens = await text_processor.tokenize(text, spelling)
        text_processor.refuse_rowless(tokens, "input")
        return tokens
    text_processor.check([part for part in text if isinstance(part, int)], "input")
    return (await text_processor.raw(text)).tokens


async def _tokens(
    service: Service, text_processor: TextProcessor, text: Text, is_cut: bool
) -> Tokens:
    facts = service.facts
    limit = min(filter(None, (service.preset.slots.n_ctx, facts.max_text_tokens)))
    if is_cut and isinstance(text, str):
        # A text that is longer is refused before its tokens are known.
        text = text[: max(CHARS_PER_TOKEN * limit, MIN_COUNTED_CHARS)]
    if isinstance(text, str) and text:
        text = facts.text_prompt + text
    try:
        tokens = await _all_tokens(text_processor, text)
    except TooLong as error:
        error.param = "input"
        raise
    if not tokens:
        raise BadRequest("input has an empty text; there is nothing to embed", "input")
    if isinstance(text, str) and facts.text_end is not None and tokens[-1] not in facts.eos:
        tokens = (*tokens, facts.text_end)
    if len(tokens) <= limit:
        return tokens
    if not is_cut:
        raise TooLong(len(tokens), limit, "input")
    # Models that embed their last token expect an end token there.
    end = tuple(token for token in tokens[-1:] if token in facts.eos)
    return (*tokens[: limit - len(end)], *end)
