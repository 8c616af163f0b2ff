"""Statistics of the prefix cache: reuse and its time, over rolling windows.

No clock: `now` is an argument, in seconds, and never goes back.
"""

from collections import deque

from msgspec import Struct
from msgspec.structs import astuple

from mlxstack.core.status import WindowSums

MINUTE_S = 60.0
HOUR_S = 3600.0
N_STEPS = 3600
"""Steps in which a window forgets: one second for an hour."""


def plus(one: WindowSums, other: WindowSums) -> WindowSums:
    """Both together."""
    return WindowSums(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))


def minus(one: WindowSums, other: WindowSums) -> WindowSums:
    """One without the other, which is a part of it."""
    return WindowSums(*(a - b for a, b in zip(astuple(one), astuple(other), strict=True)))


class SlidingWindow:
    """Sum over the last `span_s`, in steps of a 3,600th."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._parts: deque[tuple[float, WindowSums]] = deque()
        self._sum = WindowSums()

    def add(self, now: float, tally: WindowSums) -> None:
        """Count `tally` at `now`. O(1)."""
        self._sum = plus(self._sum, tally)
        if self._parts and now - self._parts[-1][0] < self._span_s / N_STEPS:
            now, before = self._parts.pop()
            tally = plus(before, tally)
        self._parts.append((now, tally))
        self.total(now)

    def total(self, now: float) -> WindowSums:
        """The sum of the last `span_s` seconds. O(1) on average."""
        while self._parts and self._parts[0][0] <= now - self._span_s:
            self._sum = minus(self._sum, self._parts.popleft()[1])
        if not self._parts:
            self._sum = WindowSums()
        return self._sum


class Rates(Struct, frozen=True):
    """Sums over the last minute, the last hour, and since the start."""

    minute: WindowSums
    hour: WindowSums
    whole: WindowSums


class CacheStats:
    """All counters of the memory. Changed by one thread only."""

    def __init__(self) -> None:
        self._minute = SlidingWindow(MINUTE_S)
        self._hour = SlidingWindow(HOUR_S)
        self._whole = WindowSums()

    def add(self, now: float, tally: WindowSums) -> None:
        """Count one request, or a part of one, at `now`."""
        self._minute.add(now, tally)
        self._hour.add(now, tally)
        self._whole = plus(self._whole, tally)

    def rates(self, now: float) -> Rates:
        """All windows."""
        return Rates(self._minute.total(now), self._hour.total(now), self._whole)
