"""Live sharing: when contexts share a prefix's KV, and where."""

from collections.abc import Sequence
from itertools import takewhile

from msgspec import Struct

MIN_TOKENS = 1024
"""Shorter prefixes are never shared live: a copy costs less than the second product."""

MOST_SPARE = 0.25
"""A prefix is shared without a copy where the rest of its buffers is at most this share of it."""


class SharingCosts(Struct, frozen=True):
    """Attention seconds of two rows on a prefix of `n_tokens`.

    `apart_s` reads the prefix once per row, `together_s` once.
    """

    n_tokens: int
    apart_s: float
    together_s: float


class LiveSharing(Struct, frozen=True):
    """Prefixes of at least `min_tokens` are shared, split at multiples of `block_size`.

    With `min_tokens` None none is.
    """

    block_size: int = 128
    min_tokens: int | None = None

    def split_point(self, n_common: int) -> int:
        """Number of the first `n_common` tokens to share; 0 for none."""
        n_tokens = n_common - n_common % self.block_size
        return n_tokens if self.min_tokens and n_tokens >= self.min_tokens else 0

    def extended(self, n_shared: int, n_common: int) -> int:
        """The split point where a context shares `n_shared` tokens already.

        A longer prefix is another copy of the shorter one, so it must be twice as long.
        """
        n_tokens = self.split_point(n_common)
        return n_tokens if not n_shared or n_tokens >= 2 * n_shared else min(n_shared, n_tokens)


NO_SHARING = LiveSharing()


class PrefixUse(Struct, frozen=True):
    """Bytes of a shared prefix in one context, of `whole_bytes`."""

    prefix: int
    n_bytes: int
    whole_bytes: int


def saved_bytes(uses: Sequence[PrefixUse]) -> int:
    """Bytes saved against a copy each; negative where buffers are larger."""
    whole = {use.prefix: use.whole_bytes for use in uses}
    return sum(use.n_bytes for use in uses) - sum(whole.values())


def least_shared(curve: Sequence[SharingCosts]) -> int | None:
    """Shortest measured prefix whose sharing is no slower; None without one."""
    longest_first = sorted(curve, key=lambda costs: -costs.n_tokens)
    faster = [*takewhile(lambda costs: costs.together_s <= costs.apart_s, longest_first)]
    return max(MIN_TOKENS, faster[-1].n_tokens) if faster else None
