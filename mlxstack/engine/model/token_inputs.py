"""Inputs of prompts, which chunks feed beside the ids of tokens."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxstack.core.errors import Unsupported
from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.request import Request
from mlxstack.engine.model.runner import SlotTokens


class TokenInputs(Protocol):
    """Inputs of all prompts. MLX thread only."""

    @property
    def placeholder(self) -> int:
        """Token of the vocabulary in place of each id without a row."""

    @property
    def n_bytes(self) -> int:
        """Bytes of inputs in memory."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Its part of `Counters`, by field."""

    @property
    def stalled(self) -> Collection[str]:
        """Requests that wait for inputs which other threads prepare."""

    def with_checkpoints(self, request: Request) -> Request:
        """The request with checkpoints where its inputs end."""

    def text(self, request: Request) -> Sequence[int]:
        """Tokens of the prompt that are text."""

    def vocabulary_ids(self, tokens: Iterable[int]) -> list[int]:
        """Tokens that have a row, `placeholder` for others."""

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """End of a chunk, `end` or one near it. Raises BadRequest."""

    def prepare(self, request: Request, start: int, end: int, seconds: float) -> bool:
        """Whether a chunk can be fed; else inputs are computed for `seconds`.

        Raises BadRequest, SetupError.
        """

    def slot_tokens(self, caches: list[Any], request: Request, start: int, end: int) -> SlotTokens:
        """Tokens `[start, end)` of a prepared prompt, for a pass. Raises Unsupported."""

    def shift(self, request: Request) -> int:
        """Position minus index of the tokens after the prompt.

        Raises BadRequest for a last token whose input no row can bring.
        """

    def note_prefilled(self, request: Request, end: int) -> None:
        """The first `end` tokens of the prompt are computed."""

    def release(self, request_id: str) -> None:
        """The request needs no inputs any more."""

    def drop(self) -> None:
        """Free what no request needs now."""


class PlainTokens:
    """Inputs of a model that takes nothing but tokens."""

    placeholder = 0
    n_bytes = 0
    counters: Mapping[str, int] = {}
    stalled: Collection[str] = ()

    def with_checkpoints(self, request: Request) -> Request:
        """The request itself."""
        return request

    def text(self, request: Request) -> Sequence[int]:
        """All tokens."""
        return request.tokens

    def vocabulary_ids(self, tokens: Iterable[int]) -> list[int]:
        """All tokens."""
        return list(tokens)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """As it is."""
        return end

    def prepare(self, request: Request, start: int, end: int, seconds: float) -> bool:
        """Always."""
        return True

    def slot_tokens(self, caches: list[Any], request: Request, start: int, end: int) -> SlotTokens:
        """Tokens of a chunk. Raises Unsupported for ids without a row."""
        tokens = request.tokens[start:end]
        _require_rows(tokens)
        return SlotTokens(caches, mx.array(tokens), n_prefill=len(request.tokens) - 1)

    def shift(self, request: Request) -> int:
        """None. Raises Unsupported for an id without a row."""
        _require_rows(request.tokens[-1:])
        return 0

    def note_prefilled(self, request: Request, end: int) -> None:
        """Nothing to release."""

    def release(self, request_id: str) -> None:
        """Nothing to release."""

    def drop(self) -> None:
        """Nothing to free."""


PLAIN_TOKENS = PlainTokens()


def _require_rows(tokens: Sequence[int]) -> None:
    """Raise Unsupported for ids for which MLX reads beyond the embedding."""
    if max(tokens, default=0) >= FIRST_VIRTUAL:
        raise Unsupported("an id of the prompt belongs to an image, which is not there; send text")
