"""What all screens have: the first line, the banner, the keys; the rest is theirs."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer

from mlxstack.tui.deeds import Target, deeds_of
from mlxstack.tui.model import Model
from mlxstack.tui.views.overview import banner
from mlxstack.tui.views.sheet import Cell, Line, Tone
from mlxstack.tui.widgets.lines import Lines
from mlxstack.tui.widgets.nav import Nav
from mlxstack.tui.widgets.section import Section


class Board(Screen[None]):
    """A screen over the model. The app sets `model`; whatever is bound to it redraws."""

    MODE: ClassVar[str]
    TARGETS: ClassVar[frozenset[Target]] = frozenset()
    EXPLAINS: ClassVar[str]

    # Before the table's own: that one tells of the row later.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", show=False, priority=True)]

    model = reactive(Model(), repaint=False)

    def __init__(self, feed: str) -> None:
        super().__init__()
        self._feed = feed

    def compose(self) -> ComposeResult:
        """First line, banner, parts, keys."""
        yield Nav(self.MODE, self._feed)
        yield Lines(_banner, "banner").data_bind(model=Board.model)
        yield from self.parts()
        yield Footer(compact=True)

    def aim(self, target: Target) -> str | None:
        """The key of the row under the cursor, if the rows of some table are of this kind.

        Asked of the table itself: a message about its cursor may come after the next key.
        """
        aims = (section.chosen for section in self.query(Section) if section.target is target)
        return next(aims, None)

    async def action_open(self) -> None:
        """More about the row under the cursor."""
        section = next((one for one in self.query(Section) if one.has_focus_within), None)
        if section is not None and section.id and section.chosen is not None:
            await self.open(section.id, section.chosen)

    async def on_section_opened(self, event: Section.Opened) -> None:
        """By mouse. The second click of two finds another screen on top."""
        if self.is_active:
            await self.open(event.section, event.key)

    async def open(self, section: str, key: str) -> None:
        """Show more about a row; returns when keys that follow are meant for that."""

    def parts(self) -> Iterable[Widget]:
        """What is between the first and the last line."""
        raise NotImplementedError


def keys_of(targets: frozenset[Target]) -> list[Binding]:
    """The keys of the deeds that such a screen offers."""
    return [
        Binding(
            deed.key,
            f"app.deed('{deed.id}')",
            deed.label,
            id=f"deed-{deed.id}",
            tooltip=deed.help,
        )
        for deed in deeds_of(targets)
    ]


def _banner(model: Model, _: int) -> tuple[Line, ...]:
    told = banner(model)
    return ((Cell(told, Tone.STRONG),),) if told else ()
