"""Lines and tables as values: what is said, and in which tone; how to draw them is not said."""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

GAP = 2


class CellStyle(StrEnum):
    """How a cell is meant; themes decide what that looks like."""

    PLAIN = "plain"
    STRONG = "strong"
    FAINT = "faint"
    GOOD = "good"
    BUSY = "busy"
    WARN = "warn"
    BAD = "bad"


class TextCell(Struct, frozen=True):
    """A piece of text. It holds no line ends and is never read as markup."""

    text: str
    tone: CellStyle = CellStyle.PLAIN


Line = tuple[TextCell, ...]


class TableColumn(Struct, frozen=True):
    """`width` in cells; a wide column takes what the others leave."""

    title: str
    width: int
    is_right: bool = False
    is_wide: bool = False


class TableRow(Struct, frozen=True):
    """`key` names the thing that the row is about."""

    key: str
    cells: tuple[TextCell, ...]


class TableData(Struct, frozen=True):
    """A titled table. `note` is said instead of rows when there are none."""

    title: Line
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[TableRow, ...] = ()
    note: str = ""


def title(name: str, rest: str = "") -> Line:
    """The heading of a sheet, with what is to be said about all of it."""
    head = (TextCell(name, CellStyle.STRONG),)
    return (*head, TextCell(f"  {rest}", CellStyle.FAINT)) if rest else head


def distinct(sheet: TableData) -> TableData:
    """Return the table with unique row keys; names may repeat."""
    seen: dict[str, int] = {}
    rows = []
    for row in sheet.rows:
        n = seen[row.key] = seen.get(row.key, 0) + 1
        rows.append(row if n == 1 else replace(row, key=f"{row.key}#{n}"))
    return sheet if len(seen) == len(rows) else distinct(replace(sheet, rows=tuple(rows)))


def fitted(columns: tuple[TableColumn, ...], width: int) -> tuple[TableColumn, ...]:
    """The same columns, the wide ones as wide as `width` cells allow, never below their own."""
    taken = sum(column.width + GAP for column in columns)
    n_wide = sum(column.is_wide for column in columns)
    spare = max(0, width - taken)
    if not n_wide:
        return columns
    return tuple(replace(c, width=c.width + spare // n_wide) if c.is_wide else c for c in columns)
