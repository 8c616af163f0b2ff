"""Bars made of text, for the terminal and for code blocks."""

from msgspec import Struct

WIDTH = 40
PARTS = " ▏▎▍▌▋▊▉█"


class Bar(Struct, frozen=True):
    """`shown` is the value in words."""

    label: str
    value: float
    shown: str


class BarChart(Struct, frozen=True):
    """Bars from zero to the greatest value."""

    title: str
    bars: tuple[Bar, ...]


def draw(chart: BarChart) -> list[str]:
    """One line per bar."""
    most = max((bar.value for bar in chart.bars), default=0.0) or 1.0
    widest = max((len(bar.label) for bar in chart.bars), default=0)
    return [f"{b.label:<{widest}}  {block(b.value / most)}  {b.shown}" for b in chart.bars]


def block(share: float) -> str:
    """A bar of `share` (0 to 1) of the width, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * WIDTH * 8)
    part = PARTS[eighths % 8] if eighths % 8 else ""
    return "█" * (eighths // 8) + part
