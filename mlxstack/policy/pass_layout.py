"""Forward passes of several tokens: layouts, seconds by width, shared passes."""

from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum, auto

from msgspec import Struct

MIN_SAVED = 0.2
"""Minimum share of time saved by sharing a pass, which delays the first prompt of it."""


class RowMode(Enum):
    """Parts of a pass that slots share."""

    ALONE = "alone"
    """Nothing: each slot has a pass of its own."""
    ATTENTION_BY_ROW = "attention by row"
    """A token each; attention modules compute one row after the other."""
    SINGLE = "single"
    """A token each; a slot of several tokens has a pass of its own."""
    RAGGED = "ragged"
    """All of it, with any number of tokens each."""


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


class SharedPrompts(Struct, frozen=True):
    """Prompts of `max_tokens` at most share a pass; 0: none do."""

    max_tokens: int = 0
    is_padded: bool = False
    """Whether each takes as long as the longest."""


NOT_SHARED = SharedPrompts()


class SharingCosts(Struct, frozen=True):
    """Seconds of passes over prompts of `n_tokens` each."""

    n_tokens: int
    alone_s: float
    """Of a pass over one prompt."""
    shared_s: float
    """Of a pass over two."""

    def gain_s(self, step_s: float) -> float:
        """Seconds by which sharing saves more than `MIN_SAVED`.

        Apart, a decode step of the first, of `step_s`, stands between the two passes.
        """
        return (1 - MIN_SAVED) * (2 * self.alone_s + step_s) - self.shared_s


def max_shared(costs: Iterable[SharingCosts], step_s: float) -> int:
    """Tokens up to which prompts gain by sharing a pass; 0: never.

    `costs` of ascending lengths are taken as long as they gain. Between the last one that does
    and the first one that does not, gain is taken for linear.
    """
    longest = 0
    before_s = 0.0
    for cost in costs:
        gain_s = cost.gain_s(step_s)
        if gain_s <= 0:
            part = before_s / (before_s - gain_s) if longest else 0.0
            return longest + int(part * (cost.n_tokens - longest))
        longest = cost.n_tokens
        before_s = gain_s
    return longest


UNMEASURED = WidthCosts()
"""All widths cost the same."""
