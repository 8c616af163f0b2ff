"""Textual's command palette, safe for keys that arrive before it is drawn."""

from contextlib import suppress

from textual.await_complete import AwaitComplete
from textual.command import Command, CommandList, CommandPalette
from textual.css.query import NoMatches


class Palette(CommandPalette):
    """Command palette that ignores keys while it is not shown."""

    def __init__(self) -> None:
        super().__init__(id="--command-palette")

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close once: a second call would close the screen below."""
        if self.is_active:
            return super().dismiss(result)
        return AwaitComplete()

    def _action_command_list(self, action: str) -> None:
        # There is no list at first, then one whose lines are not there before they are drawn.
        with suppress(NoMatches, KeyError):
            super()._action_command_list(action)

    def _refresh_command_list(
        self, command_list: CommandList, commands: list[Command], clear_current: bool
    ) -> None:
        # Commands may still be found for one that was closed.
        if self.is_active:
            super()._refresh_command_list(command_list, commands, clear_current)
