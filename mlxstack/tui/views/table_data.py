"""Lines and tables as values, apart from how they are drawn."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from mlxstack.core.formatting import NONE, clipped, count, share
from mlxstack.tui.state import DashboardState

GAP = 2
WIDE = 112
"""Cells from which on lines and tables show more."""

Row = TypeVar("Row")


class CellStyle(StrEnum):
    """Meaning of a cell; themes give it a color."""

    PLAIN = "plain"
    STRONG = "strong"
    FAINT = "faint"
    GOOD = "good"
    BUSY = "busy"
    WARN = "warn"
    BAD = "bad"
    REUSED = "reused"
    BUSY_ON_REUSED = "busy on reused"


class TextCell(Struct, frozen=True):
    """Text of a cell, on one line and without markup."""

    text: str
    tone: CellStyle = CellStyle.PLAIN


Line = tuple[TextCell, ...]


def warned(text: str, is_warning: bool, otherwise: CellStyle = CellStyle.PLAIN) -> TextCell:
    """Cell in the color of a warning, if it is one."""
    return TextCell(text, CellStyle.WARN if is_warning else otherwise)


def starred(name: str, is_pinned: bool) -> TextCell:
    """Name with a star if it is pinned."""
    return TextCell(f"* {name}" if is_pinned else name)


class DrawContext(Struct, frozen=True):
    """Input of a cell beside its row."""

    model: DashboardState
    width: int
    """Cells of the table, and of its column for a cell."""
    largest: float = 0.0
    """Full length of the bars of all rows."""


class Column(Struct, Generic[Row], frozen=True):
    """Column of a table with a row per `Row`."""

    title: str
    width: int
    """Cells, at least."""
    cell: Callable[[Row, DrawContext], TextCell]
    sort: Callable[[Row], float | None] | None = None
    """Number to sort by, the largest first; without it rows are sorted by their texts."""
    is_right: bool = False
    """Whether its texts end, not begin, below each other."""
    grows: bool = False
    """Whether it shares the cells that no column needs."""
    is_optional: bool = False
    """Whether it is left out while it has no text."""
    is_cut_inside: bool = False
    """Whether long texts are cut in the middle instead of the end."""
    min_screen: int = 0
    """Cells of the table below which it is left out."""


def number(
    title: str,
    width: int,
    value: Callable[[Row], float | None],
    text: Callable[[float], str] = count,
    *,
    tone: CellStyle = CellStyle.PLAIN,
    min_screen: int = 0,
) -> Column[Row]:
    """Column of numbers written by `text`; a dash stands for None."""

    def cell(row: Row, _: DrawContext) -> TextCell:
        amount = value(row)
        if amount is None:
            return TextCell(NONE, tone)
        return TextCell(text(amount), tone)

    return Column(title, width, cell, value, is_right=True, min_screen=min_screen)


def percentage(
    title: str,
    width: int,
    part: Callable[[Row], float],
    whole: Callable[[Row], float],
    *,
    tone: CellStyle = CellStyle.PLAIN,
    zero_tone: CellStyle = CellStyle.PLAIN,
    min_screen: int = 0,
) -> Column[Row]:
    """Column of parts in percent; a dash stands for no whole."""

    def ratio(row: Row) -> float | None:
        if not whole(row):
            return None
        return part(row) / whole(row)

    def cell(row: Row, _: DrawContext) -> TextCell:
        return TextCell(share(part(row), whole(row)), tone if part(row) else zero_tone)

    return Column(title, width, cell, ratio, is_right=True, min_screen=min_screen)


class TableRow(Struct, frozen=True):
    """Drawn row; `key` names what it is about."""

    key: str
    cells: tuple[TextCell, ...]


class TableData(Struct, frozen=True):
    """Titled table as it is drawn."""

    title: Line
    columns: tuple[Column[Any], ...] = ()
    rows: tuple[TableRow, ...] = ()
    note: str = ""
    """Line in place of missing rows."""
    values: tuple[Any, ...] = ()
    """Values of the rows, by which they are sorted; none once they are."""


def tabulated(
    head: Line,
    columns: Sequence[Column[Row]],
    rows: Iterable[tuple[str, Row]],
    context: DrawContext,
    note: str,
) -> TableData:
    """Table of rows by key, with the columns that fit."""
    pairs = tuple(rows)
    values = tuple(row for _, row in pairs)
    visible = [column for column in columns if _is_visible(column, values, context)]
    visible = fitted(visible, context.width)
    contexts = [replace(context, width=column.width) for column in visible]
    drawn = []
    for key, row in pairs:
        cells = (column.cell(row, about) for column, about in zip(visible, contexts, strict=True))
        drawn.append(TableRow(key, tuple(cells)))
    return TableData(head, tuple(visible), tuple(drawn), note, values)


def _is_visible(column: Column[Row], values: Iterable[Row], context: DrawContext) -> bool:
    if context.width < column.min_screen:
        return False
    return not column.is_optional or any(column.cell(row, context).text for row in values)


def fitted(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Columns of which those that grow fill `width`."""
    spare = max(0, width - sum(column.width + GAP for column in columns))
    more = spare // max(1, sum(column.grows for column in columns))
    return [replace(column, width=column.width + more * column.grows) for column in columns]


def cell_text(text: str, column: Column[Any]) -> str:
    """Text in exactly as many cells as the column has."""
    n_free = column.width - cell_len(text)
    if n_free >= 0:
        if column.is_right:
            return " " * n_free + text
        return text + " " * n_free
    if column.is_cut_inside and cell_len(text) == len(text):
        return clipped(text, column.width)
    return set_cell_size(text, column.width - 1) + "…"


def title(name: str, summary: str = "") -> Line:
    """Heading of a table, with a summary of its rows."""
    head = (TextCell(name, CellStyle.STRONG),)
    if summary:
        return (*head, TextCell(f"  {summary}", CellStyle.FAINT))
    return head


def arranged(table_data: TableData, filter_text: str, column_index: int | None) -> TableData:
    """Table with the rows that contain `filter_text`, sorted; its heading says so."""
    pairs = list(zip(table_data.rows, table_data.values, strict=True))
    remarks = []
    note = table_data.note
    if filter_text:
        pairs = [pair for pair in pairs if filter_text.lower() in _text(pair[0]).lower()]
        remarks.append(f"with `{filter_text}`: {len(pairs)} of {len(table_data.rows)}")
        note = "No row contains that; / and an empty line show all."
    if column_index is not None and column_index < len(table_data.columns):
        column = table_data.columns[column_index]
        pairs.sort(key=lambda pair: sort_key(column, pair[0].cells[column_index].text, pair[1]))
        remarks.append(f"by {column.title}")
    head = table_data.title
    if remarks:
        head = (*head, TextCell(f"  {', '.join(remarks)}", CellStyle.WARN))
    rows = tuple(row for row, _ in pairs)
    return replace(table_data, title=head, rows=rows, note=note, values=())


def sort_key(column: Column[Row], text: str, row: Row) -> tuple[bool, float, str]:
    """Numbers with the largest first, else texts; empty cells last."""
    if column.sort is None:
        return (text in {"", NONE}, 0.0, text.lower())
    amount = column.sort(row)
    return (amount is None, -(amount or 0.0), "")


def _text(row: TableRow) -> str:
    return " ".join(cell.text for cell in row.cells)


def distinct(table_data: TableData) -> TableData:
    """Return the table with unique row keys; names may repeat."""
    counts: dict[str, int] = {}
    rows = []
    for row in table_data.rows:
        n = counts[row.key] = counts.get(row.key, 0) + 1
        if n == 1:
            rows.append(row)
        else:
            rows.append(replace(row, key=f"{row.key}#{n}"))
    if len(counts) == len(rows):
        return table_data
    return distinct(replace(table_data, rows=tuple(rows)))
