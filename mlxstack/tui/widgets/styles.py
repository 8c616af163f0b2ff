"""Cell styles in theme colors, as Textual content and Rich styles."""

from collections.abc import Mapping

from rich.style import Style
from textual.color import Color
from textual.content import Content

from mlxstack.tui.views.table_data import CellStyle, Line

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


def rich_style(tone: CellStyle, variables: Mapping[str, str]) -> Style:
    """The style of a tone in the colors of a theme."""
    if tone in PLAIN:
        return Style.parse(PLAIN[tone])
    if tone is CellStyle.BUSY_ON_REUSED:
        reused = rich_style(CellStyle.REUSED, variables)
        return rich_style(CellStyle.BUSY, variables) + Style.from_color(bgcolor=reused.color)
    return Style.from_color(Color.parse(variables[COLORS[tone]]).rich_color)


def _name(tone: CellStyle) -> str:
    if tone in COLORS:
        return f"${COLORS[tone]}"
    return PLAIN[tone]
