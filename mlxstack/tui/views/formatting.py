"""Numbers and foreign names in few cells."""

from collections.abc import Sequence
from functools import lru_cache

from mlxstack.core.formatting import count, size

BLOCKS = " ▏▎▍▌▋▊▉█"
STEPS = "▁▂▃▄▅▆▇█"
SHADED = "▓"
"""A full cell of the upper part of a chart, which needs no color."""


def gib(n_bytes: float) -> str:
    """`0.02`, `0.4`, `12.8`, `128`: GiB without the unit."""
    value = n_bytes / 2**30
    if 0 < value < 0.095:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def stacked(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Cells of a bar per part; nonzero ones get at least one.

    Their sum is `width`.
    """
    ends = []
    so_far = 0.0
    used = 0
    for part in parts:
        so_far += part
        end = 0
        if whole:
            end = round(so_far / whole * width)
        cells = min(max(int(part > 0), end - used), width - used)
        ends.append(cells)
        used += cells
    return ends


def of_size(n_bytes: float, bound: float) -> str:
    """`7.4/12.8 GiB` where both have one unit, else `45 MiB/12.8 GiB`."""
    part = size(n_bytes)
    whole = size(bound)
    number, _, unit = part.partition(" ")
    if whole.endswith(f" {unit}"):
        return f"{number}/{whole}"
    return f"{part}/{whole}"


def images(n: int, n_computed: int) -> str:
    """`2, computed 1` as in a response's header, or nothing."""
    if not n:
        return ""
    return f"{n}, computed {n_computed}"


def rate(per_second: float) -> str:
    """Tokens per second: `4.2`, `43`, `1.2k`."""
    if per_second < 99.95:
        return f"{per_second:.1f}"
    return count(per_second)


def bar(part: float, whole: float, width: int) -> str:
    """A bar of `width` cells, filled to an eighth of a cell."""
    filled = 0.0
    if whole:
        filled = min(1.0, max(0.0, part / whole)) * width * 8
    n_full, n_eighths = divmod(round(filled), 8)
    drawn = "█" * n_full
    if n_eighths and n_full < width:
        drawn += BLOCKS[n_eighths]
    return drawn.ljust(width, "░")


def plot_stacked(
    lower: Sequence[float | None], upper: Sequence[float | None], height: int
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Stacked columns of `lower` and `upper`, as lines from the top.

    Part 0 is lower, 1 upper, 2 a cell with both: lower in front of upper.
    """
    pairs = [(a, (a or 0.0) + (b or 0.0)) for a, b in zip(lower, upper, strict=True)]
    top = max((both for a, both in pairs if a is not None), default=0.0) or 1.0
    levels = [_levels(a, both, top, height) for a, both in pairs]
    return tuple(tuple(_stack(level, row) for level in levels) for row in reversed(range(height)))


def _levels(lower: float | None, both: float, top: float, height: int) -> tuple[int, int] | None:
    """Eighths of cells of both; what is more than nothing is seen."""
    if lower is None:
        return None
    n_lower = round(lower / top * height * 8)
    if lower > 0:
        n_lower = max(n_lower, 1)
    return n_lower, max(round(both / top * height * 8), n_lower)


@lru_cache(maxsize=8192)
def _stack(level: tuple[int, int] | None, row: int) -> tuple[str, int]:
    if level is None:
        return " ", 0
    lower, both = (max(0, min(8, end - row * 8)) for end in level)
    if lower == 8 or (lower and both == lower):
        return STEPS[lower - 1], 0
    if lower:
        return STEPS[lower - 1], 2
    if both:
        return (SHADED if both == 8 else STEPS[both - 1]), 1
    return " ", 0
