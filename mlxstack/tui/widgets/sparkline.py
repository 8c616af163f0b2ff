"""One speed over the last minutes."""

from textual.app import RenderResult
from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from mlxstack.tui.state import WINDOW_S, DashboardState, series
from mlxstack.tui.views.formatting import plot, rate
from mlxstack.tui.views.overview import speed
from mlxstack.tui.widgets.styles import content

PREFILL, DECODE = 0, 1
COLOURS = ("$accent", "$success")


class SparklineChart(Widget):
    """`which` of the two speeds: PREFILL or DECODE."""

    model = reactive(DashboardState(), repaint=False)

    def __init__(self, which: int, name: str) -> None:
        super().__init__(id=name)
        self._which = which
        self._drawn = Content()
        self._drawn_size = Size()

    def watch_model(self) -> None:
        """Drawn again only when the picture is another one."""
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
        values = tuple(pair[self._which] for pair in series(self.model, width))
        top = max((value for value in values if value), default=0.0)
        head = content((speed(self.model)[self._which],))
        peak = Content.styled(f"top {rate(top)}".rjust(max(0, width - head.cell_length)), "dim")
        bars = [Content.styled(line, COLOURS[self._which]) for line in plot(values, height - 2)]
        return Content("\n").join([Content.assemble(head, peak), *bars, _axis(width)])


def _axis(width: int) -> Content:
    start = f"-{WINDOW_S / 60:.0f} min"
    return Content.styled(f"{start}{'now'.rjust(max(0, width - len(start)))}", "dim")
