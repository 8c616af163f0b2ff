"""A table that is patched, not rebuilt: only cells that changed are drawn again."""

from typing import Any

from rich.style import Style
from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable
from textual.widgets.data_table import ColumnKey, RowKey

from mlxstack.tui.views.table_data import TableColumn, TableData, TableRow, TextCell
from mlxstack.tui.widgets.styles import text


class PatchedTable(DataTable[Text]):
    """Shows sheets; the cursor stays on the thing that it is on, also when all go and come back."""

    def __init__(self) -> None:
        super().__init__(
            cursor_type="row", zebra_stripes=False, cursor_foreground_priority="renderable"
        )
        self._sheet = TableData(title=())
        self._last: str | None = None

    def on_mount(self) -> None:
        """Colours are part of the cells."""
        self.app.theme_changed_signal.subscribe(self, self._repaint)

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor."""
        rows = self._sheet.rows
        return rows[self.cursor_row].key if 0 <= self.cursor_row < len(rows) else None

    def show(self, sheet: TableData) -> None:
        """Become this sheet."""
        before, self._sheet = self._sheet, sheet
        place = self.cursor_row
        self._last = self._key_at(before) or self._last
        if sheet.columns != before.columns:
            self.clear(columns=True)
            for i, column in enumerate(sheet.columns):
                self.add_column(_head(column), width=column.width, key=str(i))
            self._fill(sheet, place)
        elif [row.key for row in sheet.rows] != [row.key for row in before.rows]:
            self.clear()
            self._fill(sheet, place)
        else:
            for i, (old, new) in enumerate(zip(before.rows, sheet.rows, strict=True)):
                if old != new:
                    self._patch(i, old, new)

    def _render_cell(
        self,
        row_index: int,
        column_index: int,
        base_style: Style,
        width: int,
        cursor: bool = False,
        hover: bool = False,
    ) -> Any:
        """Draw a cell unless one of this content is known.

        Textual's own cache forgets all cells of a table when one is updated.
        """
        is_head = row_index < 0
        cell = (
            self.ordered_columns[column_index].label
            if is_head
            else self.get_cell_at(Coordinate(row_index, column_index))
        )
        content = (cell.plain, tuple(cell.spans), cell.style, cell.justify)
        place = (row_index, column_index, base_style, width, cursor, hover)
        known: Any = self._cell_render_cache
        key = (content, place, self._show_hover_cursor, self._pseudo_class_state)
        if key not in known:
            known[key] = super()._render_cell(
                row_index, column_index, base_style, width, cursor, hover
            )
        return known[key]

    def _key_at(self, sheet: TableData) -> str | None:
        row = self.cursor_row
        return sheet.rows[row].key if 0 <= row < len(sheet.rows) else None

    def _fill(self, sheet: TableData, place: int) -> None:
        """The cursor on what it was on, or on what is at its place now."""
        for row in sheet.rows:
            self.add_row(*self._texts(row), key=row.key)
        keys = [row.key for row in sheet.rows]
        if self._last in keys:
            place = keys.index(self._last)
        # Textual clamps it to the number of rows.
        self.move_cursor(row=place, scroll=False)

    def _patch(self, place: int, old: TableRow, new: TableRow) -> None:
        """Replace the cells that differ; `update_cell` would draw all rows again."""
        cells = self._data[RowKey(new.key)]
        for i, (before, now) in enumerate(zip(old.cells, new.cells, strict=True)):
            if before != now:
                cells[ColumnKey(str(i))] = self._text(i, now)
        self._update_count += 1
        self.refresh_row(place)

    def _texts(self, row: TableRow) -> list[Text]:
        return [self._text(i, cell) for i, cell in enumerate(row.cells)]

    def _text(self, column: int, cell: TextCell) -> Text:
        return text(cell, self.app.theme_variables, self._sheet.columns[column].is_right)

    def _repaint(self, _: Any) -> None:
        for row in self._sheet.rows:
            for i, cell in enumerate(row.cells):
                self.update_cell(row.key, str(i), self._text(i, cell))


def _head(column: TableColumn) -> Text:
    return Text(column.title, justify="right" if column.is_right else "left", no_wrap=True)
