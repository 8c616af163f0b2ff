"""How fast this machine computes, learned from what it did last."""

import math

from msgspec import Struct

FEWEST = 16
"""Shorter chunks, in tokens, measure overhead rather than throughput."""

MEMORY = 0.95
"""Decay of older chunks in the regression of the slowdown."""


class RegressionSums(Struct, frozen=True):
    """Decaying sums over chunks: tokens, and per token position, cost in seconds, and products."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


class ThroughputModel(Struct, frozen=True):
    """Measured: prefill tokens per second at position 0, and seconds of a decode step.

    Each token before a token makes it slower by the share `slowdown`: attention looks back at
    all of them. 0: not known yet.
    """

    prefill_tps: float = 0.0
    decode_s: float = 0.0
    slowdown: float = 0.0
    trend: RegressionSums = RegressionSums()


def observe_prefill(
    speed: ThroughputModel, start: int, n_tokens: int, seconds: float
) -> ThroughputModel:
    """Update by a chunk from `start` on; the level follows at once, the slowdown slowly."""
    if n_tokens < FEWEST or seconds <= 0:
        return speed
    middle = start + n_tokens / 2
    trend = _add(speed.trend, n_tokens, middle, seconds / n_tokens)
    slowdown = _slowdown(trend)
    measured = n_tokens / seconds
    expected = speed.prefill_tps / (1 + speed.slowdown * middle) or measured
    level = 0.5 * (measured + expected) * (1 + slowdown * middle)
    return ThroughputModel(level, speed.decode_s, slowdown, trend)


def observe_decode(speed: ThroughputModel, seconds: float) -> ThroughputModel:
    """Update by a decode step; slower steps count at once, faster ones gradually."""
    decode_s = max(seconds, 0.8 * speed.decode_s + 0.2 * seconds)
    return ThroughputModel(speed.prefill_tps, decode_s, speed.slowdown, speed.trend)


def prefill_s(speed: ThroughputModel, start: int, n_tokens: int) -> float:
    """Seconds that `n_tokens` from position `start` on will take; 0 when nothing is known."""
    if not speed.prefill_tps:
        return 0.0
    return n_tokens * (1 + speed.slowdown * (start + n_tokens / 2)) / speed.prefill_tps


def tokens_within(speed: ThroughputModel, start: int, seconds: float) -> int:
    """How many tokens from position `start` on take at most `seconds`: `prefill_s` solved."""
    work = max(0.0, seconds) * speed.prefill_tps
    first = 1 + speed.slowdown * start
    return int(2 * work / (first + math.sqrt(first * first + 2 * speed.slowdown * work)))


def _add(trend: RegressionSums, n: int, x: float, y: float) -> RegressionSums:
    return RegressionSums(
        MEMORY * trend.n + n,
        MEMORY * trend.x + n * x,
        MEMORY * trend.y + n * y,
        MEMORY * trend.xx + n * x * x,
        MEMORY * trend.xy + n * x * y,
    )


def _slowdown(trend: RegressionSums) -> float:
    """Slope over intercept of the least-squares line; 0 while all chunks lie together."""
    x, y = trend.x / trend.n, trend.y / trend.n
    spread = trend.xx / trend.n - x * x
    if spread < FEWEST * FEWEST:
        return 0.0
    slope = max(0.0, (trend.xy / trend.n - x * y) / spread)
    return slope / max(y - slope * x, 0.1 * y)
