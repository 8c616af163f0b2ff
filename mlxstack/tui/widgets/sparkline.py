"""Charts of tokens per second over the last minutes."""

from itertools import groupby

from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from mlxstack.tui.state import WINDOW_S, DashboardState, series
from mlxstack.tui.views.formatting import plot_stacked, rate
from mlxstack.tui.views.overview import speed
from mlxstack.tui.views.table_data import CellStyle, Line, TextCell
from mlxstack.tui.widgets.styles import rich_style

PREFILL = 0
DECODE = 1
MIN_WITH_AXIS = 5
PARTS = {
    PREFILL: (CellStyle.BUSY, CellStyle.REUSED, CellStyle.BUSY_ON_REUSED),
    DECODE: (CellStyle.GOOD,) * 3,
}


class SparklineChart(Widget):
    """One chart: PREFILL stacks reused on computed tokens, DECODE shows generated ones."""

    model = reactive(DashboardState(), repaint=False)

    def __init__(self, which: int, name: str) -> None:
        super().__init__(id=name)
        self._which = which
        self._lines: tuple[Line, ...] = ()

    def watch_model(self) -> None:
        """Redraw only the lines that have changed."""
        before = self._lines
        self._lines = self._picture()
        pairs = enumerate(zip(before, self._lines, strict=False))
        width = self.size.width
        changed = [Region(0, y, width, 1) for y, (old, new) in pairs if old != new]
        if changed:
            self.refresh(*changed)

    def on_resize(self, _: events.Resize) -> None:
        self._lines = self._picture()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """The speed now, its past, or the axis."""
        base = self.visual_style.rich_style
        variables = self.app.theme_variables
        cells = self._lines[y] if y < len(self._lines) else ()
        return Strip(Segment(cell.text, base + rich_style(cell.tone, variables)) for cell in cells)

    def _picture(self) -> tuple[Line, ...]:
        width, height = self.size
        past = series(self.model, width)
        lower = [speeds[self._which] for speeds in past]
        upper: list[float | None] = [0.0] * len(past)
        if self._which == PREFILL:
            upper = [reused for _, _, reused in past]
        top = max(((a or 0.0) + (b or 0.0) for a, b in zip(lower, upper, strict=True)), default=0.0)
        head = speed(self.model)[self._which]
        n_free = width - sum(len(cell.text) for cell in head)
        peak = f" top {rate(top)}"
        if len(peak) <= n_free:
            head = (*head, TextCell(peak.rjust(n_free), CellStyle.FAINT))
        has_axis = height >= MIN_WITH_AXIS
        n_rows = max(1, height - 1 - has_axis)
        lines = [head, *map(self._line, plot_stacked(lower, upper, n_rows))]
        if has_axis:
            lines.append((_axis(width),))
        return tuple(lines)

    def _line(self, cells: tuple[tuple[str, int], ...]) -> Line:
        """A line of cells, each run of one color at once."""
        tones = PARTS[self._which]
        runs = groupby(cells, key=lambda cell: cell[1])
        return tuple(TextCell("".join(char for char, _ in run), tones[part]) for part, run in runs)


def _axis(width: int) -> TextCell:
    start = f"-{WINDOW_S / 60:.0f} min"
    return TextCell(f"{start}{'now'.rjust(max(0, width - len(start)))}", CellStyle.FAINT)
