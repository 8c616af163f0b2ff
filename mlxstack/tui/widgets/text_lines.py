"""Lines of a view, redrawn when they change."""

from collections.abc import Callable

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.geometry import Region
from textual.reactive import reactive
from textual.widget import Widget

from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.table_data import Line
from mlxstack.tui.widgets.styles import content

Draw = Callable[[DashboardState, int], tuple[Line, ...]]


class TextLines(Widget):
    """Text of a view; hidden while it is empty."""

    model = reactive(DashboardState(), repaint=False)

    def __init__(self, draw: Draw, name: str) -> None:
        super().__init__(id=name, markup=False)
        self._draw_lines = draw
        self._shown: tuple[Line, ...] | None = None

    def watch_model(self) -> None:
        """Redraw when the text has changed."""
        self._redraw()

    def on_resize(self, _: events.Resize) -> None:
        self._redraw()

    def render(self) -> Content:
        """The lines as they were drawn last."""
        return content(self._shown or ())

    def _redraw(self) -> None:
        before = self._shown or ()
        lines = self._draw_lines(self.model, self.app.size.width)
        if lines == self._shown:
            return
        self._shown = lines
        self.display = bool(lines)
        width = self.content_size.width
        if _n_rows(before, width) == _n_rows(lines, width) is not None:
            pairs = enumerate(zip(before, lines, strict=True))
            self.refresh(*(Region(0, y, width, 1) for y, (old, new) in pairs if old != new))
        else:
            # The layout of a screen takes longer than drawing it.
            self.refresh(layout=self.styles.height is None or self.styles.height.is_auto)


class TileBox(TextLines):
    """Tile with its name in the border, on wide terminals."""

    def __init__(self, draw: Draw, name: str) -> None:
        super().__init__(draw, name)
        self.border_title = name.removeprefix("tile-").capitalize()


def _n_rows(lines: tuple[Line, ...], width: int) -> int | None:
    """Count the rows of these lines; None where one of them wraps."""
    widest = max((sum(cell_len(cell.text) for cell in line) for line in lines), default=0)
    if widest > width:
        return None
    return len(lines)
