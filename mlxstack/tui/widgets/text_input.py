"""Text input whose keys are dispatched in order by the app."""

from textual.events import Key, Paste
from textual.widgets import Input
from textual.widgets.input import Selection


class LineInput(Input):
    """Input with its proposal selected, so that typing replaces it."""

    def on_mount(self) -> None:
        """Select at once: selection on focus would swallow the first letters."""
        self.select_on_focus = False
        self.selection = Selection(0, len(self.value))

    def took(self, event: Key | Paste) -> bool:
        """Whether the event brought text."""
        text = ""
        if isinstance(event, Key) and event.is_printable:
            text = event.character or ""
        if isinstance(event, Paste):
            text = next(iter(event.text.splitlines()), "")
        if text:
            self.replace(text, *self.selection)
        return bool(text)
