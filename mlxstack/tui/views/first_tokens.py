"""Times until the first token of the last requests: sparkline and percentiles."""

from collections.abc import Sequence
from statistics import median

from mlxstack.core.formatting import short_time
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import STEPS
from mlxstack.tui.views.table_data import CellStyle, Line, TextCell

MAX_COLUMNS = 40


def first_tokens(model: DashboardState, width: int) -> tuple[Line, ...]:
    """Sparkline of the last requests, latest at the right, and percentiles."""
    latest = [view.ttft_s for view in model.frame.requests or () if view.ttft_s]
    if not latest:
        return ()
    seconds = latest[: min(MAX_COLUMNS, width // 3)][::-1]
    ordered = sorted(latest)
    late_s = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    percentiles = f" median {short_time(median(latest))}, 95% {short_time(late_s)}"
    slowest = f", slowest {short_time(ordered[-1])}, of the last {len(latest)}"
    return (
        (
            TextCell("first token ", CellStyle.FAINT),
            TextCell(sparkline(seconds), CellStyle.BUSY),
            TextCell(percentiles),
            TextCell(slowest, CellStyle.FAINT),
        ),
    )


def sparkline(values: Sequence[float]) -> str:
    """A cell per value, the highest one full."""
    top = max(values, default=0.0) or 1.0
    return "".join(STEPS[min(len(STEPS) - 1, int(value / top * len(STEPS)))] for value in values)
