"""Charts of tokens per second over the last minutes."""

from itertools import groupby

from textual.app import RenderResult
from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from mlxstack.tui.state import WINDOW_S, DashboardState, series
from mlxstack.tui.views.formatting import plot_stacked, rate
from mlxstack.tui.views.overview import speed
from mlxstack.tui.widgets.styles import content

PREFILL, DECODE = 0, 1
LEAST_WITH_AXIS = 5
PARTS = {
    PREFILL: ("$accent", "$secondary", "$accent on $secondary"),
    DECODE: ("$success", "$success", "$success"),
}


class SparklineChart(Widget):
    """One chart: PREFILL stacks reused on computed tokens, DECODE shows generated ones."""

    model = reactive(DashboardState(), repaint=False)

    def __init__(self, which: int, name: str) -> None:
        super().__init__(id=name)
        self._which = which
        self._drawn = Content()
        self._drawn_size = Size()

    def watch_model(self) -> None:
        """Redraw only when the picture has changed."""
        before = self._drawn
        if self._draw() != before:
            self.refresh()

    def render(self) -> RenderResult:
        """The speed now, its past, and the axis."""
        return self._drawn if self._drawn_size == self.size else self._draw()

    def _draw(self) -> Content:
        self._drawn, self._drawn_size = self._picture(), self.size
        return self._drawn

    def _picture(self) -> Content:
        width, height = self.size.width, self.size.height
        past = series(self.model, width)
        lower = [one[self._which] for one in past]
        upper = [one[2] if self._which == PREFILL else 0.0 for one in past]
        pairs = zip(lower, upper, strict=True)
        top = max(((a or 0.0) + (b or 0.0) for a, b in pairs), default=0.0)
        head = content((speed(self.model)[self._which],))
        room, told = width - head.cell_length, f" top {rate(top)}"
        peak = Content.styled(told.rjust(room) if len(told) <= room else "", "dim")
        axis = [_axis(width)] if height >= LEAST_WITH_AXIS else []
        n_rows = max(1, height - 1 - len(axis))
        lines = [self._line(line) for line in plot_stacked(lower, upper, n_rows)]
        return Content("\n").join([Content.assemble(head, peak), *lines, *axis])

    def _line(self, cells: tuple[tuple[str, int], ...]) -> Content:
        """A line of cells, each run of one color at once."""
        styles = PARTS[self._which]
        runs = groupby(cells, key=lambda cell: cell[1])
        return Content.assemble(
            *(("".join(char for char, _ in run), styles[part]) for part, run in runs)
        )


def _axis(width: int) -> Content:
    start = f"-{WINDOW_S / 60:.0f} min"
    return Content.styled(f"{start}{'now'.rjust(max(0, width - len(start)))}", "dim")
