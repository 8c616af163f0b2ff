"""Table with incremental updates: only changed cells are drawn again."""

from collections.abc import Iterable
from typing import Any

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip
from textual.widgets import DataTable
from textual.widgets.data_table import RowKey

from mlxstack.tui.views.table_data import CellStyle, Column, TableData, TableRow, cell_text
from mlxstack.tui.widgets.styles import rich_style


class PatchedTable(DataTable[Text]):
    """Table of a `TableData`; the cursor follows its row."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=False)
        self._table_data = TableData(title=())
        self._last: str | None = None

    @property
    def chosen(self) -> str | None:
        """The key of the row under the cursor."""
        rows = self._table_data.rows
        if 0 <= self.cursor_row < len(rows):
            return rows[self.cursor_row].key
        return None

    def show(self, table_data: TableData) -> None:
        """Show this table instead; only what differs is drawn again."""
        self._last = self.chosen or self._last
        before = self._table_data
        self._table_data = table_data
        place = self.cursor_row
        if table_data.columns != before.columns:
            self.clear(columns=True)
            for i, column in enumerate(table_data.columns):
                self.add_column(Text(column.title), width=column.width, key=str(i))
            self._fill(table_data, place)
        elif [row.key for row in table_data.rows] != [row.key for row in before.rows]:
            self.clear()
            self._fill(table_data, place)
        else:
            for i, (old, new) in enumerate(zip(before.rows, table_data.rows, strict=True)):
                if old != new:
                    self._patch(i, new)

    def render_line(self, y: int) -> Strip:
        """Render a row, without Textual's wrapping and measuring of cells."""
        row = y - 1 + self.scroll_offset.y if y else -1
        if row >= len(self._table_data.rows):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        is_cursor = row == self.cursor_row
        is_hovered = row == self.hover_row
        flags = (row < 0, False, False, is_hovered, is_cursor, True, self._show_hover_cursor)
        base = self._get_row_style(row, self.visual_style.rich_style)
        base += self._get_styles_to_render_cell(*flags, False, False)[0]
        variables = self.app.theme_variables
        parts = []
        for i, (content, tone, column) in enumerate(self._cells(row)):
            style = base + Style.from_meta({"row": row, "column": i})
            gap = Segment(" " * self.cell_padding, style)
            text = cell_text(content, column)
            parts += [gap, Segment(text, style + rich_style(tone, variables)), gap]
        outside = base + Style.from_meta({"row": row, "column": 0, "out_of_bounds": True})
        return Strip(parts).adjust_cell_length(self.size.width, outside).simplify()

    def _cells(self, row: int) -> Iterable[tuple[str, CellStyle, Column[Any]]]:
        columns = self._table_data.columns
        if row < 0:
            return [(column.title, CellStyle.PLAIN, column) for column in columns]
        cells = self._table_data.rows[row].cells
        return [(cell.text, cell.tone, column) for cell, column in zip(cells, columns, strict=True)]

    def _update_dimensions(self, new_rows: Iterable[RowKey]) -> None:
        """Update the size from the known column widths and line heights."""
        del new_rows
        super()._update_dimensions(())

    def _fill(self, table_data: TableData, place: int) -> None:
        """Restore the cursor to its row, else to its place."""
        for row in table_data.rows:
            self.add_row(*_texts(row), key=row.key)
        keys = [row.key for row in table_data.rows]
        if self._last in keys:
            place = keys.index(self._last)
        # Textual clamps it to the number of rows.
        self.move_cursor(row=place, scroll=False)

    def _patch(self, place: int, new: TableRow) -> None:
        """Replace the cells of a row; `update_cell` would draw all rows again."""
        cells = self._data[RowKey(new.key)]
        cells.update(zip(cells, _texts(new), strict=True))
        self.refresh_row(place)


def _texts(row: TableRow) -> list[Text]:
    """Values for Textual, in which nothing is markup; `render_line` draws the cells."""
    return [Text(cell.text) for cell in row.cells]
