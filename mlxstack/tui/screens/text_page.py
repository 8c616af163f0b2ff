"""A page over the screen, to be read and closed."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from mlxstack.tui.views.table_data import Line
from mlxstack.tui.widgets.styles import content


class TextPage(ModalScreen[None]):
    """Text in a box; v shows the `more` lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "close", "Close"),
        Binding("v", "show_more", "More"),
    ]

    def __init__(
        self,
        heading: str,
        lines: tuple[Line, ...],
        is_at_end: bool = False,
        more: tuple[Line, ...] = (),
    ) -> None:
        super().__init__()
        self._more = more
        self._is_at_end = is_at_end
        self._heading = heading
        self._lines = lines

    def compose(self) -> ComposeResult:
        """The lines in a box that scrolls."""
        with VerticalScroll(classes="box") as box:
            box.border_title = self._heading
            box.border_subtitle = "v shows more, esc closes" if self._more else "esc closes"
            yield Static(content(self._lines), markup=False)

    def on_mount(self) -> None:
        """Show the end of a log, where the last lines are."""
        if self._is_at_end:
            self.query_one(VerticalScroll).scroll_end(animate=False)

    def action_show_more(self) -> None:
        """Add the further lines, once."""
        more = self._more
        self._more = ()
        if more:
            self._lines = (*self._lines, (), *more)
            self.query_one(Static).update(content(self._lines))
            self.query_one(VerticalScroll).border_subtitle = "esc closes"

    def action_close(self) -> None:
        """Back to the screen; a second key closes no other one."""
        if self.is_active:
            self.dismiss()

    def on_click(self, event: events.Click) -> None:
        """A click beside the box closes it."""
        if event.widget is self:
            self.action_close()
