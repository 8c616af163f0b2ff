"""Lines and tables as values, apart from how they are drawn."""

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import cache

from msgspec import Struct, convert
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from mlxstack.core.formatting import clipped, share

GAP = 2
UNITS = {
    "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0,
    "k": 1e3, "M": 1e6, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
COLUMN = re.compile(
    r"(?P<title>[^,]+) (?P<side>[>*]?)(?P<width>\d+)(?P<flag>[?~]?)(?:@(?P<least>\d+))?,? ?"
)
SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
NUMBER = re.compile(r"(?P<n>\d+(?:\.\d+)?) ?(?P<unit>k|M|KiB|MiB|GiB|TiB)?(?![a-z])")


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


def share_cell(part: float, whole: float) -> TextCell:
    """Percentage that is good news, unless it is nothing."""
    return TextCell(share(part, whole), CellStyle.GOOD if part else CellStyle.FAINT)


class TableColumn(Struct, frozen=True):
    """`width` in cells; `side` and `flag` are marks of `columns_of`."""

    title: str
    side: str
    width: int
    flag: str
    least: int


@cache
def columns_of(text: str) -> tuple[TableColumn, ...]:
    """Columns of a text such as `name *12, state 8?, tokens >7@112`.

    A number is a width; `>` is right-aligned, `*` takes what the others leave. `?` is left out
    where it has no text, and every column where the table has fewer cells than `@` says. Texts of
    `~` are cut in the middle, others at the end.
    """
    found = (one.groupdict("0") for one in COLUMN.finditer(text))
    return tuple(convert(one, TableColumn, strict=False) for one in found)


class TableRow(Struct, frozen=True):
    """`key` names the thing that the row is about."""

    key: str
    cells: tuple[TextCell, ...]


class TableData(Struct, frozen=True):
    """Titled table; `note` stands in for missing rows."""

    title: Line
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[TableRow, ...] = ()
    note: str = ""


def tabulated(
    head: Line, columns: str, rows: Iterable[TableRow], width: int, note: str
) -> TableData:
    """Table with the columns of `columns_of` that `width` has room for."""
    rows = tuple(rows)
    places = {}
    for i, column in enumerate(columns_of(columns)):
        has_text = column.flag != "?" or any(row.cells[i].text for row in rows)
        if has_text and width >= column.least:
            places[i] = column
    kept = tuple(TableRow(row.key, tuple(row.cells[i] for i in places)) for row in rows)
    return TableData(head, fitted(tuple(places.values()), width), kept, note)


def cell_text(text: str, column: TableColumn) -> str:
    """Text in exactly as many cells as the column has."""
    n_free = column.width - cell_len(text)
    if n_free >= 0:
        if column.side == ">":
            return " " * n_free + text
        return text + " " * n_free
    if column.flag == "~" and cell_len(text) == len(text):
        return clipped(text, column.width)
    return set_cell_size(text, column.width - 1) + "…"


def title(name: str, rest: str = "") -> Line:
    """Heading of a table, with a summary of its rows."""
    head = (TextCell(name, CellStyle.STRONG),)
    if rest:
        return (*head, TextCell(f"  {rest}", CellStyle.FAINT))
    return head


def arranged(table_data: TableData, filter_text: str, column: int | None) -> TableData:
    """Filter rows by `filter_text` and sort them; the heading tells both."""
    rows = table_data.rows
    told = []
    if filter_text:
        rows = tuple(row for row in rows if filter_text.lower() in _text(row).lower())
        told.append(f"with `{filter_text}`: {len(rows)} of {len(table_data.rows)}")
    if column is not None and column < len(table_data.columns):
        rows = tuple(sorted(rows, key=lambda row: sort_key(row.cells[column].text)))
        told.append(f"by {table_data.columns[column].title}")
    if not told:
        return table_data
    head = (*table_data.title, TextCell(f"  {', '.join(told)}", CellStyle.WARN))
    note = "No row contains that; / and an empty line show all." if filter_text else table_data.note
    return replace(table_data, title=head, rows=rows, note=note)


def sort_key(text: str) -> tuple[int, float, str]:
    """Numbers first, the largest on top, units counted; then texts."""
    if SPAN.fullmatch(text):
        parts = ((float(n), unit) for n, unit in SPAN_PART.findall(text))
        return 0, -sum(n * UNITS[unit] for n, unit in parts), text
    if found := NUMBER.match(text):
        unit = found["unit"] or ""
        return 0, -float(found["n"]) * UNITS.get(unit, 1.0), text
    if text in {"", "-"}:
        return (2, 0.0, "")
    return (1, 0.0, text.lower())


def _text(row: TableRow) -> str:
    return " ".join(cell.text for cell in row.cells)


def distinct(table_data: TableData) -> TableData:
    """Return the table with unique row keys; names may repeat."""
    seen: dict[str, int] = {}
    rows = []
    for row in table_data.rows:
        n = seen[row.key] = seen.get(row.key, 0) + 1
        rows.append(row if n == 1 else replace(row, key=f"{row.key}#{n}"))
    if len(seen) == len(rows):
        return table_data
    return distinct(replace(table_data, rows=tuple(rows)))


def fitted(columns: tuple[TableColumn, ...], width: int) -> tuple[TableColumn, ...]:
    """Columns with the wide ones fitted into `width`, never below theirs."""
    spare = max(0, width - sum(column.width + GAP for column in columns))
    n_wide = sum(column.side == "*" for column in columns)
    more = spare // max(1, n_wide)
    return tuple(replace(one, width=one.width + more * (one.side == "*")) for one in columns)
