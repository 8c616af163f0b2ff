"""Base of all screens: tabs, banner, key bindings."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget

from mlxstack.tui.actions import actions_of
from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.screens.dialogs import SearchDialog
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.overview import banner
from mlxstack.tui.views.table_data import CellStyle, Line, TextCell
from mlxstack.tui.widgets.key_footer import KeyFooter
from mlxstack.tui.widgets.tabs import Nav
from mlxstack.tui.widgets.text_lines import TextLines
from mlxstack.tui.widgets.titled_table import TitledTable


class BaseScreen(Screen[None]):
    """Base of all screens; changes of `model` redraw bound widgets."""

    MODE: ClassVar[str]
    HELP: ClassVar[str]
    """Heading of its section in help.md."""

    # Before the table's own: that one tells of the row later.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", show=False, priority=True),
        Binding("slash", "search", "Search", id="search", key_display="/"),
        Binding("s", "sort", "Sort", id="sort"),
    ]

    model = reactive(DashboardState(), repaint=False)

    def __init__(self, feed: str) -> None:
        super().__init__()
        self._feed = feed

    def compose(self) -> ComposeResult:
        """First line, banner, parts, keys."""
        yield Nav(self.MODE, self._feed)
        yield TextLines(_banner, "banner").data_bind(model=BaseScreen.model)
        for part in self.compose_body():
            yield part.data_bind(model=BaseScreen.model)
        yield KeyFooter(compact=True)

    def aim(self, target: ActionTarget) -> str | None:
        """Key of the row at the cursor, in tables of this kind.

        Asked of the table itself: a message about its cursor may come after the next key.
        """
        aims = (section.chosen for section in self.query(TitledTable) if section.target is target)
        return next(aims, None)

    async def action_open(self) -> None:
        """Open the row under the cursor."""
        section = self._focused_table()
        if section is not None and section.id and section.chosen is not None:
            await self.open(section.id, section.chosen)

    async def action_search(self) -> None:
        """Ask for words, and show only rows that contain them."""
        section = self._focused_table()
        if section is not None:
            question = f"Show which rows of {section.name_of}? Nothing shows all."
            dialog = SearchDialog(question, section.filter_text, section.hits)
            await self.app.push_screen(dialog, section.search)

    def action_sort(self) -> None:
        """Sort by the next column, at last in the service's order."""
        section = self._focused_table()
        if section is not None:
            section.sort_next()

    def _focused_table(self) -> TitledTable | None:
        return next((table for table in self.query(TitledTable) if table.has_focus_within), None)

    async def on_titled_table_opened(self, event: TitledTable.Opened) -> None:
        """Open a row, but only once per double click."""
        if self.is_active:
            await self.open(event.section, event.key)

    async def open(self, section: str, key: str) -> None:
        """Show details of a row; returns once they take keys."""

    def compose_body(self) -> Iterable[Widget]:
        """Widgets between tabs and footer, each with a `model`."""
        raise NotImplementedError


def keys_of(*targets: ActionTarget) -> list[Binding]:
    """Bindings of the actions on these targets."""
    return [
        Binding(
            action.key,
            f"app.act('{action.id}')",
            action.label,
            show=not action.is_destructive,
            id=f"action-{action.id}",
            tooltip=action.help,
        )
        for action in actions_of(targets)
    ]


def _banner(model: DashboardState, _: int) -> tuple[Line, ...]:
    text = banner(model)
    if text:
        return ((TextCell(text, CellStyle.STRONG),),)
    return ()
