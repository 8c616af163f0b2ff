"""Cell styles in theme colors, as Textual content and Rich text."""

from collections.abc import Mapping

from rich.style import Style
from rich.text import Text
from textual.color import Color
from textual.content import Content

from mlxstack.tui.views.table_data import CellStyle, Line, TextCell

COLORS = {
    CellStyle.GOOD: "success",
    CellStyle.BUSY: "accent",
    CellStyle.WARN: "warning",
    CellStyle.BAD: "error",
    CellStyle.REUSED: "secondary",
}
PLAIN = {CellStyle.PLAIN: "", CellStyle.STRONG: "bold", CellStyle.FAINT: "dim"}


def content(lines: tuple[Line, ...]) -> Content:
    """Lines as content; nothing in them is markup."""
    drawn = (Content.assemble(*((c.text, _name(c.tone)) for c in line)) for line in lines)
    return Content("\n").join(drawn)


def text(cell: TextCell, variables: Mapping[str, str], is_right: bool) -> Text:
    """A table cell as text; nothing in it is markup."""
    return Text(
        cell.text,
        style=_style(cell.tone, variables),
        justify="right" if is_right else "left",
        no_wrap=True,
        overflow="ellipsis",
        end="",
    )


def _name(tone: CellStyle) -> str:
    return f"${COLORS[tone]}" if tone in COLORS else PLAIN[tone]


def _style(tone: CellStyle, variables: Mapping[str, str]) -> Style:
    if tone in PLAIN:
        return Style.parse(PLAIN[tone])
    return Style.from_color(Color.parse(variables[COLORS[tone]]).rich_color)
