"""What all screens have: the first line, the banner, the keys; the rest is theirs."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
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
