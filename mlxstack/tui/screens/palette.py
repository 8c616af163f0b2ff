"""The command palette of the toolkit, when keys come faster than it draws."""

from contextlib import suppress

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette


class Palette(CommandPalette):
    """Two keys in one breath would end the app: a second enter, and a page up or down."""

    def __init__(self) -> None:
        super().__init__(id="--command-palette")

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Only once: the second time, another screen would be on top."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def _action_command_list(self, action: str) -> None:
        # The lines that it pages through are not there before they are drawn.
        with suppress(KeyError):
            super()._action_command_list(action)
