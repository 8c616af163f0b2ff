"""Statistics of samples: medians, spreads, percentiles, ratios; durations and bytes as text."""

import statistics
from collections.abc import Sequence

from msgspec import Struct


class MedianRange(Struct, frozen=True):
    """The median of `n` values, with the lowest and the highest."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> MedianRange:
    """Median and range of at least one value."""
    return MedianRange(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: int) -> float:
    """Linearly interpolated percentile of the values; 0 of none."""
    if not values:
        return 0.0
    if len(values) == 1:
        return values[0]
    if percent >= 100:
        return max(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def ratio(part: float, whole: float) -> float:
    """`part` / `whole`; 0 where there is no whole."""
    if not whole:
        return 0.0
    return part / whole


def seconds(value: float) -> str:
    """A duration in the unit that suits it."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def lasting(values: Sequence[float]) -> str:
    """Durations as their median and, of several, how far they lie apart."""
    of = spread(values)
    if of.n == 1:
        return seconds(of.median)
    return f"{seconds(of.median)} ({seconds(of.low)} to {seconds(of.high)})"


def megabytes(n_bytes: float) -> str:
    """Bytes as MB (10^6)."""
    if n_bytes < 1e8:
        return f"{n_bytes / 1e6:.3g} MB"
    return f"{n_bytes / 1e6:.0f} MB"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.2f} x"
