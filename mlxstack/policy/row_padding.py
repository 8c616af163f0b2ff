"""Row padding: matrix products of more rows that take less time."""

from collections.abc import Sequence

MIN_GAIN = 0.05
"""Share of the time that padding has to save."""


def padded_counts(seconds: Sequence[float]) -> tuple[int, ...]:
    """Rows to compute for 0, 1, 2 ... rows.

    It is the same number, or a larger one that takes less time; `seconds[n]` is that of n rows.
    """
    counts = list(range(len(seconds)))
    best = len(seconds) - 1
    for n in reversed(range(len(seconds))):
        if seconds[n] <= seconds[best]:
            best = n
        if seconds[best] <= (1 - MIN_GAIN) * seconds[n]:
            counts[n] = best
    return tuple(counts)
