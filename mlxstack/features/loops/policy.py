"""When a text repeats itself: a rule on token ids.

A repetition of period p covers n tokens when each of the last n - p tokens equals the one p before
it. Honest text has such runs too (zeros, dots, tables, two equal headers), so the rule waits as
long as its promise permits: see `max_covered`.
"""

from array import array
from collections.abc import Sequence

from msgspec import Struct

MAX_SHORT = 512
"""Tokens after which a repetition of a short period has gone on for too long."""
MAX_COPIES = 3
"""Copies of a long period, the last of which is not completed."""
MAX_PERIOD = 4096
MAX_RUNS = 4
"""Periods that are followed at once."""
PROBE = 256
"""Tokens whose previous occurrence gives a period.

Of a run that is long enough, more than these equal the tokens one period before.
"""
BASE = 1_000_003
MODULUS = (1 << 61) - 1
TOKEN_BYTES = 8


class Repetition(Struct, frozen=True):
    """Tokens at the end of a text that repeat."""

    period: int
    n_tokens: int
    """Tokens from the beginning of the first copy on."""

    @property
    def is_too_long(self) -> bool:
        """Whether no honest text goes on so long."""
        return self.n_tokens >= max_covered(self.period)


def max_covered(period: int) -> int:
    """Tokens that a repetition may cover.

    Those of a long period end before the third copy is complete, those of a short one after 512.
    """
    return max(MAX_SHORT, MAX_COPIES * period - 1)


class RepetitionRule:
    """Repetitions at the end of a text, token by token.

    A rolling hash of the last tokens gives periods; each is followed as long as it goes on.
    """

    def __init__(self, probe: int = PROBE, max_period: int = MAX_PERIOD) -> None:
        self.tokens: list[int] = []
        self._probe = probe
        self._max_period = max_period
        self._start = 0
        """Tokens before are not looked at."""
        self._hash = 0
        self._oldest = pow(BASE, probe, MODULUS)
        self._positions: dict[int, int] = {}
        """Ends of the last probes by hash, and those of the ones before: a bound on memory."""
        self._older: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        """Tokens that equal those one period before, by period."""

    def observe(self, token: int) -> Repetition | None:
        """The repetition that a text ends with now.

        Of several, one that is too long, or the shortest period. None until a probe was repeated.
        """
        tokens = self.tokens
        tokens.append(token)
        n = len(tokens)
        self._hash = (self._hash * BASE + token + 1) % MODULUS
        n_seen = n - self._start
        if n_seen <= self._probe:
            if n_seen == self._probe:
                self._positions[self._hash] = n
            return None
        oldest = tokens[n - 1 - self._probe] + 1
        self._hash = (self._hash - oldest * self._oldest) % MODULUS
        if self._runs:
            self._follow(token, n)
        end = self._positions.get(self._hash) or self._older.get(self._hash)
        if end is not None and n - end not in self._runs:
            self._begin(n, n - end)
        self._positions[self._hash] = n
        if len(self._positions) > self._max_period:
            self._older = self._positions
            self._positions = {}
        return self._longest() if self._runs else None

    def restart(self) -> None:
        """Look at the tokens from here on only."""
        self._start = len(self.tokens)
        self._hash = 0
        self._positions = {}
        self._older = {}
        self._runs = {}

    def _follow(self, token: int, n: int) -> None:
        """Count a token that repeats, and drop the periods that it ends."""
        self._runs = {
            period: n_equal + 1
            for period, n_equal in self._runs.items()
            if token == self.tokens[n - 1 - period]
        }

    def _begin(self, n: int, period: int) -> None:
        """Follow a period, unless only its hash is equal."""
        n_equal = self._count_equal(n, period)
        if n_equal < self._probe or period > self._max_period:
            return
        self._runs[period] = n_equal
        if len(self._runs) > MAX_RUNS:
            del self._runs[max(self._runs)]

    def _longest(self) -> Repetition:
        repetitions = [Repetition(period, period + n) for period, n in sorted(self._runs.items())]
        return next(filter(lambda run: run.is_too_long, repetitions), repetitions[0])

    def _count_equal(self, n: int, period: int) -> int:
        """Last tokens that equal those `period` before, up to three periods."""
        tokens = self.tokens
        first = max(self._start + period, n - MAX_COPIES * max(period, self._probe))
        i = n - 1
        while i >= first and tokens[i] == tokens[i - period]:
            i -= 1
        return n - 1 - i


class TokenText:
    """Text in which runs of tokens are looked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._bytes: bytes | None = None
        """Computed at the first look, and once."""

    def has(self, run: Sequence[int]) -> bool:
        """Whether a run of tokens is a part of it."""
        if self._bytes is None:
            self._bytes = _bytes_of(self._tokens)
        needle = _bytes_of(run)
        at = self._bytes.find(needle)
        while at >= 0 and at % TOKEN_BYTES:
            at = self._bytes.find(needle, at + 1)
        return at >= 0


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
