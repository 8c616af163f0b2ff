"""Widths with equal bits, and whether they are worth their cost."""

from collections.abc import Sequence
from itertools import groupby
from math import ceil

from msgspec import Struct

from mlxstack.core.exact_rows import ExactBits

MAX_PADDING = 48
"""Rows to which a single row is padded at most."""
MAX_COST = 0.05
"""Share of decode and of prefill that equal bits may cost with `auto`."""


class RowRange(Struct, frozen=True):
    """Row counts at which rows have the same bits."""

    floor: int
    ceiling: int = 0
    """0: any number of rows."""
    n_used: int = 0
    """First rows of each `floor` that have the same bits; 0: all rows have."""

    def padded(self, n_rows: int) -> int:
        """Rows to compute for `n_rows`; the same number beyond the range."""
        if self.n_used:
            return ceil(n_rows / self.n_used) * self.floor
        return max(n_rows, self.floor)

    @property
    def n_counts(self) -> float:
        """Number of row counts in the range."""
        if self.ceiling:
            return self.ceiling - self.floor + 1
        return float("inf")


def equal_range(bits: Sequence[tuple[int, int]]) -> RowRange | None:
    """Longest run of row counts with the same bits.

    `bits`: ascending row counts, each with the number of its bits among all that differ.

    A run that reaches the last count has no ceiling. None where no two counts are equal, or
    where a lone row would need more than `MAX_PADDING` rows.
    """
    runs = [[n for n, _ in run] for _, run in groupby(bits, key=lambda pair: pair[1])]
    last = bits[-1][0]
    ranges = [
        RowRange(run[0], 0 if run[-1] == last else run[-1])
        for run in runs
        if len(run) > 1 and run[0] <= MAX_PADDING
    ]
    return max(ranges, key=lambda found_range: found_range.n_counts, default=None)


def common_ceiling(ranges: Sequence[RowRange]) -> int:
    """Largest number of rows in all ranges; 0: any."""
    return min((rows.ceiling for rows in ranges if rows.ceiling), default=0)


HALF_TWELVES = RowRange(floor=12, n_used=6)
"""OpenBLAS computes 12 rows as twice 6 on CPUs with AVX2, which add in another order."""


class Costs(Struct, frozen=True):
    """Shares of time that equal bits cost; None: not measured."""

    decode: float | None = None
    prefill: float | None = None

    @property
    def is_high(self) -> bool:
        """Whether a share is more than `auto` accepts."""
        return max(self.decode or 0.0, self.prefill or 0.0) > MAX_COST

    def described(self) -> str:
        """The measured shares in words."""
        pairs = (("decode", self.decode), ("prefill", self.prefill))
        return " and ".join(f"{cost:.0%} of {name}" for name, cost in pairs if cost is not None)


def cost_of(plain_s: float, exact_s: float) -> float:
    """Share of time that is added; 0 where it is faster."""
    return max(0.0, exact_s / plain_s - 1)


def decide(setting: ExactBits, why_not: str, costs: Costs) -> tuple[bool, str]:
    """Whether rows are computed with equal bits, and why or why not.

    `why_not`: what this device cannot do; empty if it can.
    """
    if setting is ExactBits.OFF:
        return False, "batch.exact is off"
    if why_not:
        return False, why_not
    if setting is ExactBits.ON:
        return True, "batch.exact is on"
    shares = costs.described()
    if costs.is_high:
        return False, f"it costs {shares}; batch.exact: on accepts that"
    if costs.decode is None or costs.prefill is None:
        return False, "there was no time to measure its cost; batch.exact: on does without"
    return True, f"it costs {shares}"
