"""An n-gram index over a prompt and its answer: how did it go on the last time? O(1) per token.

The prompt is indexed once by sorting packed n-grams; the answer goes into a dictionary.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

ORDER = 3
"""Tokens that must agree before a continuation is proposed."""

BITS = 21
"""Bits of a token in a packed n-gram: `ORDER` times as many fit 63."""

N_CANDIDATES, LONGEST_MATCH = 8, 32
"""Of so many latest places the one with the longest match is taken, compared so far back."""

MASK = (1 << ORDER * BITS) - 1


class NgramIndex:
    """Follows one answer. `append` every token, then ask for the `continuation`."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        grams = _packed(np.array(self._tokens[:-1], np.int64))
        order = np.argsort(grams, kind="stable")
        self._grams = array("q", grams[order].tobytes())
        self._places = array("q", (order + ORDER).astype(np.int64).tobytes())
        self._answered: dict[int, int] = {}
        self._gram = 0
        for token in self._tokens[-ORDER:]:
            self._gram = self._gram << BITS | token
        self._next: int | None = self._find()

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        if len(self._tokens) >= ORDER:
            self._answered[self._gram] = len(self._tokens)
        self._tokens.append(token)
        self._gram = (self._gram << BITS | token) & MASK
        if self._next is not None and self._tokens[self._next] == token:
            self._next += 1
        else:
            self._next = self._find()

    def continuation(self, n: int) -> list[int]:
        """At most `n` tokens that followed the longest match; a loop goes on as a loop."""
        if self._next is None:
            return []
        span = self._tokens[self._next : self._next + n]
        while len(span) < n:
            span += span[: n - len(span)]
        return span

    def _find(self) -> int | None:
        """The place after the longest match with the last tokens, of several the latest."""
        if len(self._tokens) < ORDER:
            return None
        answered = self._answered.get(self._gram)
        places = [] if answered is None else [answered]
        end = bisect_right(self._grams, self._gram)
        start = max(0, end - N_CANDIDATES)
        while end > start and self._grams[end - 1] == self._gram:
            end -= 1
            places.append(self._places[end])
        if len(places) < 2:
            return places[0] if places else None
        return max(places, key=lambda place: (self._match(place), place))

    def _match(self, place: int) -> int:
        """Number of tokens before `place` that agree with the last ones."""
        tokens, n = self._tokens, ORDER
        most = min(place, LONGEST_MATCH)
        while n < most and tokens[place - 1 - n] == tokens[-1 - n]:
            n += 1
        return n


def _packed(
    tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Every n-gram of `tokens` as one number."""
    n = max(0, len(tokens) - ORDER + 1)
    grams = np.zeros(n, np.int64)
    for i in range(ORDER):
        grams = grams << BITS | tokens[i : i + n]
    return grams
