"""N-gram index over texts that a response may repeat.

O(1) per token. Texts that are known before the answer are indexed once, by sorting packed
n-grams; the answer goes into a dictionary.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

ORDER = 3
"""Tokens that must agree before a continuation is proposed."""

BITS = 21
"""Bits of a token in a packed n-gram: `ORDER` times as many fit 63."""

MASK = (1 << ORDER * BITS) - 1

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

N_CANDIDATES = 8
MAX_MATCH = 32
"""Latest places that are compared, and tokens compared; the longest match counts."""


class Place(Struct, frozen=True):
    """Continuation of a text after an n-gram: at `tokens[offset]`."""

    tokens: Sequence[int]
    offset: int


class IndexedText:
    """Text with its n-grams; appended tokens are not included."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        grams = _packed(np.array(tokens[:-1], np.int64))
        order = np.argsort(grams, kind="stable")
        self._grams = array("q", grams[order].tobytes())
        self._places = array("q", (order + ORDER).astype(np.int64).tobytes())

    def places(self, gram: int) -> list[Place]:
        """The latest places after this n-gram."""
        end = bisect_right(self._grams, gram)
        start = max(0, end - N_CANDIDATES)
        places = []
        while end > start and self._grams[end - 1] == gram:
            end -= 1
            places.append(Place(self._tokens, self._places[end]))
        return places


class NgramIndex:
    """Follows one answer. `append` every token, then ask for the `continuation`.

    `prediction` is the answer that the client expects.
    """

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self._tokens = list(prompt)
        self._texts = [IndexedText(self._tokens)]
        if prediction:
            # With the end of the prompt before it, it is found where the answer begins.
            self._texts.append(IndexedText([*prompt[-MAX_MATCH:], *prediction]))
        self._answered: dict[int, int] = {}
        self._gram = 0
        for token in self._tokens[-ORDER:]:
            self._gram = extended(self._gram, token)
        self._next = self._find()

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        if len(self._tokens) >= ORDER:
            self._answered[self._gram] = len(self._tokens)
        self._tokens.append(token)
        self._gram = extended(self._gram, token)
        place = self._next
        if place is not None and place.tokens[place.offset] == token:
            after = Place(place.tokens, place.offset + 1)
            self._next = after if after.offset < len(after.tokens) else self._find()
        else:
            self._next = self._find()

    def continuation(self, n: int) -> list[int]:
        """At most `n` tokens that followed the longest match."""
        if self._next is None:
            return []
        span = list(self._next.tokens[self._next.offset : self._next.offset + n])
        while self._next.tokens is self._tokens and len(span) < n:
            span += span[: n - len(span)]
        return span

    def _find(self) -> Place | None:
        """Position after the longest, latest match with the last tokens."""
        if len(self._tokens) < ORDER:
            return None
        places: list[Place] = []
        for text in self._texts:
            places += reversed(text.places(self._gram))
        answered = self._answered.get(self._gram)
        if answered is not None:
            places.append(Place(self._tokens, answered))
        if len(places) < 2:
            return places[0] if places else None
        return max(enumerate(places), key=lambda ranked: (self._match(ranked[1]), ranked[0]))[1]

    def _match(self, place: Place) -> int:
        """Number of tokens before `place` that agree with the last ones."""
        own = self._tokens
        text = place.tokens
        offset = place.offset
        n = ORDER
        most = min(offset, MAX_MATCH, len(own))
        while n < most and text[offset - 1 - n] == own[-1 - n]:
            n += 1
        return n


def extended(gram: int, token: int) -> int:
    """The n-gram that ends with `token`, after `gram`."""
    return (gram << BITS | token) & MASK


def _packed(tokens: Numbers) -> Numbers:
    """Every n-gram of `tokens` as one number."""
    n = max(0, len(tokens) - ORDER + 1)
    grams = np.zeros(n, np.int64)
    for i in range(ORDER):
        grams = grams << BITS | tokens[i : i + n]
    return grams
