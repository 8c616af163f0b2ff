"""Logprobs in the shape of chat completions and in that of legacy completions."""

from msgspec import Struct

from mlxstack.service.response_parts import TokenLogprob
from mlxstack.service.text_processor import TextProcessor

# JSON knows no infinity; OpenAI's own floor for tokens that cannot happen.
LEAST = -9999.0


class Alternative(Struct, frozen=True):
    """A token that could have been chosen. `bytes` is exact where `token` cannot be."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float


class SampledLogprob(Struct, frozen=True):
    """The token that was chosen, among the most likely ones."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: tuple[Alternative, ...]


class Logprobs(Struct, frozen=True):
    """Chat: one entry per token."""

    content: tuple[SampledLogprob, ...]
    refusal: None = None


class LegacyLogprobs(Struct, frozen=True):
    """Completions: four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def logprobs(notes: tuple[TokenLogprob, ...], words: TextProcessor) -> Logprobs | None:
    """None when the request did not ask for any, or no token came."""
    chosen = tuple(_chosen(note, note.logprob, words) for note in notes if note.logprob is not None)
    return Logprobs(chosen) if chosen else None


def legacy(
    notes: tuple[TokenLogprob, ...], words: TextProcessor, offset: int
) -> LegacyLogprobs | None:
    """`offset` is the length of the text before these tokens, in characters."""
    own = [note.logprob for note in notes if note.logprob is not None]
    if not own:
        return None
    tokens = [_text(words.piece(note.token)) for note in notes]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return LegacyLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(logprob) for logprob in own],
        top_logprobs=[{_text(words.piece(t)): _finite(p) for t, p in note.top} for note in notes],
        text_offset=offsets,
    )


def _chosen(note: TokenLogprob, logprob: float, words: TextProcessor) -> SampledLogprob:
    own = _alternative(note.token, logprob, words)
    return SampledLogprob(
        id=own.id,
        token=own.token,
        bytes=own.bytes,
        logprob=own.logprob,
        top_logprobs=tuple(_alternative(token, logprob, words) for token, logprob in note.top),
    )


def _alternative(token: int, logprob: float, words: TextProcessor) -> Alternative:
    piece = words.piece(token)
    return Alternative(token, _text(piece), tuple(piece), _finite(logprob))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
