"""Lines and tables as values, apart from how they are drawn."""

import re
from enum import StrEnum
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

GAP = 2
UNITS = {
    "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0,
    "k": 1e3, "M": 1e6, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
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


class TableColumn(Struct, frozen=True):
    """`width` in cells; a wide column takes what the others leave."""

    title: str
    width: int
    is_right: bool = False
    is_wide: bool = False


@cache
def columns_of(text: str) -> tuple[TableColumn, ...]:
    """Columns of a text such as `name *12, state 8, tokens >7`.

    A number is a width; `>` is right-aligned, `*` takes what the others leave.
    """
    parts = (part.rpartition(" ") for part in text.split(", ") if part)
    return tuple(
        TableColumn(name, int(size.lstrip(">*")), size.startswith(">"), size.startswith("*"))
        for name, _, size in parts
    )


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


def title(name: str, rest: str = "") -> Line:
    """Heading of a table, with a summary of its rows."""
    head = (TextCell(name, CellStyle.STRONG),)
    return (*head, TextCell(f"  {rest}", CellStyle.FAINT)) if rest else head


def arranged(table_data: TableData, words: str, column: int | None) -> TableData:
    """Filter rows by `words` and sort them; the heading tells both."""
    rows, told = table_data.rows, []
    if words:
        rows = tuple(row for row in rows if words.lower() in _text(row).lower())
        told.append(f"with `{words}`: {len(rows)} of {len(table_data.rows)}")
    if column is not None and column < len(table_data.columns):
        rows = tuple(sorted(rows, key=lambda row: sort_key(row.cells[column].text)))
        told.append(f"by {table_data.columns[column].title}")
    if not told:
        return table_data
    head = (*table_data.title, TextCell(f"  {', '.join(told)}", CellStyle.WARN))
    note = "No row contains that; / and an empty line show all." if words else table_data.note
    return replace(table_data, title=head, rows=rows, note=note)


def sort_key(text: str) -> tuple[int, float, str]:
    """Numbers first, the largest on top, units counted; then texts."""
    if SPAN.fullmatch(text):
        parts = ((float(n), unit) for n, unit in SPAN_PART.findall(text))
        return 0, -sum(n * UNITS[unit] for n, unit in parts), text
    if found := NUMBER.match(text):
        unit = found["unit"] or ""
        return 0, -float(found["n"]) * UNITS.get(unit, 1.0), text
    return (2, 0.0, "") if text in {"", "-"} else (1, 0.0, text.lower())


def _text(row: TableRow) -> str:
    return " ".join(cell.text for cell in row.cells)


def distinct(table_data: TableData) -> TableData:
    """Return the table with unique row keys; names may repeat."""
    seen: dict[str, int] = {}
    rows = []
    for row in table_data.rows:
        n = seen[row.key] = seen.get(row.key, 0) + 1
        rows.append(row if n == 1 else replace(row, key=f"{row.key}#{n}"))
    return table_data if len(seen) == len(rows) else distinct(replace(table_data, rows=tuple(rows)))


def fitted(columns: tuple[TableColumn, ...], width: int) -> tuple[TableColumn, ...]:
    """Columns with the wide ones fitted into `width`, never below theirs."""
    taken = sum(column.width + GAP for column in columns)
    n_wide = sum(column.is_wide for column in columns)
    spare = max(0, width - taken)
    if not n_wide:
        return columns
    return tuple(replace(c, width=c.width + spare // n_wide) if c.is_wide else c for c in columns)
