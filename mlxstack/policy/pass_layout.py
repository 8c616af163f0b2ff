"""Forward passes of several tokens: layouts of their rows, and seconds by their width."""

from bisect import bisect_right
from enum import Enum, auto

from msgspec import Struct


class PassLayout(Enum):
    """Layout in which a model computes rows of several tokens."""

    RAGGED = auto()
    """Every token is a row of one pass."""
    PADDED = auto()
    """All rows in one pass, padded to the longest."""
    APART = auto()
    """Rows of one token in one pass, each other row in its own."""
    ALONE = auto()
    """Each row in a pass of its own."""


class WidthCosts(Struct, frozen=True):
    """Seconds of a forward pass by its width in tokens, ascending widths."""

    widths: tuple[int, ...] = (1,)
    seconds: tuple[float, ...] = (1.0,)

    def seconds_at(self, width: int) -> float:
        """Interpolate between known widths; beyond them the last slope goes on."""
        widths = self.widths
        seconds = self.seconds
        if len(widths) == 1 or width <= widths[0]:
            return seconds[0]
        i = min(bisect_right(widths, width), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return max(seconds[i - 1] + slope * (width - widths[i - 1]), seconds[0])


def shortens_waits(alone_s: float, shared_s: float, step_s: float) -> bool:
    """Whether prompts that come together have their first tokens sooner in one pass, on average.

    One alone takes a pass of `alone_s`, two share one of `shared_s`; apart, a decode step of the
    first stands between them. What holds for two holds for any number of them, if a pass takes a
    fixed time and one for each token.
    """
    return 2 * shared_s < alone_s + (2 * alone_s + step_s)


UNMEASURED = WidthCosts()
"""All widths cost the same."""
