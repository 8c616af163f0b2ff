"""Table with a heading, and a note for an empty table."""

from collections.abc import Callable
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.table_data import TableData, arranged, distinct
from mlxstack.tui.widgets.styles import content
from mlxstack.tui.widgets.table import PatchedTable

Draw = Callable[[DashboardState, int], TableData]


class TitledTable(Vertical):
    """Table with a heading; `target` is what its rows are, for actions."""

    model = reactive(DashboardState(), repaint=False)

    @dataclass
    class RowChosen(Message):
        """The cursor is on this thing; None when there is none."""

        target: ActionTarget
        key: str | None

    @dataclass
    class Opened(Message):
        """A row was opened."""

        section: str
        key: str

    def __init__(self, draw: Draw, name: str, target: ActionTarget | None = None) -> None:
        super().__init__(id=name)
        self._draw = draw
        self._table = PatchedTable()
        self.target = target
        self._shown = TableData(())
        self._announced: str | None = None
        self.filter_text = ""
        self._sorted_by: int | None = None

    @property
    def name_of(self) -> str:
        """The heading of the table."""
        if self._shown.title:
            return self._shown.title[0].text
        return ""

    def search(self, filter_text: str | None) -> None:
        """Show only rows that contain these words; None changes nothing."""
        if filter_text is not None:
            self.filter_text = filter_text
            self._redraw()

    def hits(self, filter_text: str) -> str:
        """Search, and return the number of rows that are left."""
        self.search(filter_text)
        n_rows = len(self._shown.rows)
        return "1 row" if n_rows == 1 else f"{n_rows} rows"

    def sort_next(self) -> None:
        index = 0
        if self._sorted_by is not None:
            index = self._sorted_by + 1
        self._sorted_by = index if index < len(self._shown.columns) else None
        self._redraw()

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor."""
        return self._table.chosen

    def compose(self) -> ComposeResult:
        yield Static(classes="heading", markup=False)
        yield self._table
        yield Static(classes="note", markup=False)

    def watch_model(self) -> None:
        """Redraw when the state has changed."""
        self._redraw()

    def on_resize(self, _: events.Resize) -> None:
        """Redraw for the new width, which other columns fit."""
        self._redraw()

    def on_data_table_row_highlighted(self, event: PatchedTable.RowHighlighted) -> None:
        event.stop()
        self._choose()

    def on_data_table_row_selected(self, event: PatchedTable.RowSelected) -> None:
        """Enter, or a click on the row under the cursor."""
        event.stop()
        key = self.chosen
        if key is not None and self.id is not None:
            self.post_message(self.Opened(self.id, key))

    def _redraw(self) -> None:
        # Before it is laid out it has the width of the app, as nearly all of them do afterwards.
        width = self.size.width or self.app.size.width
        if not (self.is_mounted and width):
            return
        drawn = self._draw(self.model, width)
        table_data = distinct(arranged(drawn, self.filter_text, self._sorted_by))
        if table_data != self._shown:
            self._become(table_data)
        # A table that was hidden and comes back may lose the focus after it came.
        if table_data.rows and self.screen.focused is None and self.app.app_focus:
            self.screen.set_focus(self._table)

    def _become(self, table_data: TableData) -> None:
        heading, note = self.query(Static)
        if table_data.title != self._shown.title:
            heading.update(content((table_data.title,)), layout=False)
        if table_data.note != self._shown.note:
            note.update(table_data.note)
        note.display = not table_data.rows and bool(table_data.note)
        self._table.display = bool(table_data.rows)
        self._table.show(table_data)
        self._shown = table_data
        self._choose()

    def _choose(self) -> None:
        chosen = self.chosen
        if self.target is not None and chosen != self._announced:
            self._announced = chosen
            self.post_message(self.RowChosen(self.target, chosen))
