"""The last line: keys that can be pressed now."""

from typing import Any

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Footer


class KeyFooter(Footer):
    """Footer that is composed anew only when its keys differ.

    Textual tells of bindings whenever the focus, the cursor or the model changes.
    """

    def compose(self) -> ComposeResult:
        """The keys of the screen."""
        self._shown = _keys(self.screen) if self._bindings_ready else None
        yield from super().compose()

    def bindings_changed(self, screen: Screen[Any]) -> None:
        """Compose other keys, and those that became enabled or disabled."""
        if _keys(screen) != self._shown:
            super().bindings_changed(screen)


def _keys(screen: Screen[Any]) -> list[Any]:
    return [binding[1:] for binding in screen.active_bindings.values()]
