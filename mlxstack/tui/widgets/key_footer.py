"""The last line: keys that can be pressed now."""

from typing import Any

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Footer


class KeyFooter(Footer):
    """Footer that is rebuilt only when its keys change.

    Textual reports new bindings on every change of focus, cursor or model.
    """

    def compose(self) -> ComposeResult:
        self._shown = _keys(self.screen) if self._bindings_ready else None
        yield from super().compose()

    def bindings_changed(self, screen: Screen[Any]) -> None:
        """Rebuild for other keys, and for keys that were enabled or disabled."""
        if _keys(screen) != self._shown:
            super().bindings_changed(screen)


def _keys(screen: Screen[Any]) -> list[Any]:
    return [binding[1:] for binding in screen.active_bindings.values()]
