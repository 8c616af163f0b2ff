"""The dashboard: a feed folded into a model, and screens over it."""

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.events import Event, Key, Paste
from textual.markup import escape
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Input

from mlxstack.core.formatting import printable
from mlxstack.tui.actions import ACTIONS, action_of
from mlxstack.tui.actions.action import (
    Action,
    ActionContext,
    ActionTarget,
    Aim,
    LocalActions,
    ServiceCalls,
)
from mlxstack.tui.feed import Feed
from mlxstack.tui.help import help_lines
from mlxstack.tui.run_action import PendingAction, holder, question, run_action
from mlxstack.tui.screens.agents import AgentsScreen
from mlxstack.tui.screens.base import BaseScreen
from mlxstack.tui.screens.cache import CacheScreen
from mlxstack.tui.screens.dialogs import Question
from mlxstack.tui.screens.models import ModelsScreen
from mlxstack.tui.screens.overview import OverviewScreen
from mlxstack.tui.screens.palette import Palette
from mlxstack.tui.screens.requests import RequestsScreen
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.state import DashboardState, reduce
from mlxstack.tui.theme import HOUSE, LIGHT, ThemeChoice
from mlxstack.tui.views.table_data import TextCell
from mlxstack.tui.widgets.tabs import MODES
from mlxstack.tui.widgets.text_input import LineInput
from mlxstack.tui.widgets.titled_table import TitledTable

BOARDS: dict[str, type[BaseScreen]] = {
    board.MODE: board
    for board in (OverviewScreen, CacheScreen, AgentsScreen, RequestsScreen, ModelsScreen)
}


@dataclass
class Updated(Message):
    """New dashboard state; a newer one replaces it before it is drawn."""

    model: DashboardState

    def can_replace(self, message: Message) -> bool:
        """Replace it by any later one."""
        return isinstance(message, Updated)


class Dashboard(App[None]):
    """`calls` runs the actions; None when a recording is replayed.

    `machine` is the computer of the service, when it is this one; `keymap` has keys of the user by
    the ids of bindings.
    """

    TITLE = "mlx-stack"
    CSS_PATH = "dashboard.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (112, "-wide"), (180, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (18, "-short"), (36, "-tall"), (50, "-towering")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(i), f"show('{mode}')", mode.capitalize(), show=False, id=mode)
            for i, mode in enumerate(MODES, 1)
        ),
        Binding("question_mark", "explain", "Help", id="help", key_display="?"),
        Binding("l", "log", "Log", id="log"),
        Binding("q", "quit", "Quit", id="quit"),
    ]

    def __init__(
        self,
        feed: Feed,
        calls: ServiceCalls | None,
        look: ThemeChoice,
        machine: LocalActions | None = None,
        keymap: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for theme in (HOUSE, LIGHT, look.own):
            if theme is not None:
                self.register_theme(theme)
        self.keymap = dict(keymap or {})
        self.set_keymap(self.keymap)
        self.theme = look.theme if look.theme in self.available_themes else HOUSE.name
        self.model = DashboardState()
        self.calls = calls
        self.machine = machine
        self.chosen = {ActionTarget.SERVICE: "", ActionTarget.CACHE: ""}
        if machine is not None:
            self.chosen[ActionTarget.MACHINE] = ""
        self._feed = feed
        self._look = look
        for mode, board in BOARDS.items():
            self.add_mode(mode, partial(board, feed.name))

    async def on_mount(self) -> None:
        """Show the first screen and follow the feed."""
        self.theme_changed_signal.subscribe(self, lambda theme: self._look.choose(theme.name))
        await self.action_show(MODES[0])
        self.run_worker(self._follow(), name="feed")

    async def on_event(self, event: Event) -> None:
        """Run keys strictly one after another: over SSH they come in bursts.

        Textual posts a key to the focused widget and runs its binding when it bubbles back, so
        that later keys of a burst would reach that widget before the binding has changed it.
        """
        if not (isinstance(event, Key | Paste) and await self._acted(event)):
            await super().on_event(event)

    async def _acted(self, event: Key | Paste) -> bool:
        """Run a key's binding, or type into a dialog; whether it did."""
        if not self.screen_stack:
            return True  # The app is closing.
        if event.is_forwarded:
            return False
        self.app_focus = True
        line = self.focused
        if self.screen.maximized or (isinstance(line, Input) and not isinstance(line, LineInput)):
            return False
        if isinstance(event, Key) and event.key in self.screen.active_bindings:
            active = self.screen.active_bindings[event.key]
            return active.enabled and await self.run_action(active.binding.action, active.node)
        return isinstance(line, LineInput) and line.took(event)

    async def _follow(self) -> None:
        model = self.model
        try:
            async with aclosing(self._feed.news()) as feed:
                async for news in feed:
                    model = reduce(model, news)
                    self.post_message(Updated(model))
        except OSError as why:  # An OSError here can only come from writing the recording.
            self.exit(
                return_code=1, message=f"error: the recording cannot be written: {why.strerror}"
            )

    def on_updated(self, message: Updated) -> None:
        """Hand the new state to the visible screens."""
        self.model = message.model
        with self.batch_update():
            self._hand_over()

    def on_titled_table_row_chosen(self, message: TitledTable.RowChosen) -> None:
        """Remember the row under the cursor as target of actions."""
        if message.key is None:
            self.chosen.pop(message.target, None)
        else:
            self.chosen[message.target] = message.key
        if self.screen_stack:
            self.refresh_bindings()

    async def action_show(self, mode: str) -> None:
        await self.switch_mode(mode)
        self._hand_over()

    def action_explain(self) -> None:
        """Show the help page of the screen."""
        if isinstance(self.screen, BaseScreen):
            self.push_screen(TextPage("Help", help_lines(self.screen.HELP, self.keymap)))

    def action_log(self) -> None:
        """Show the service log's end, on the service's computer."""
        if isinstance(self.screen, ModalScreen):
            return
        if self.machine is None:
            remedy = "the log is on the computer of the service: `mlx-stack logs` shows it there"
            self.notify(f"Log: {remedy}", severity="warning", markup=False)
            return
        lines = tuple((TextCell(printable(line)),) for line in self.machine.log())
        self.push_screen(TextPage("Log", lines, is_at_end=True))

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette())

    async def action_act(self, name: str) -> None:
        """Run an action on the chosen target, after its question."""
        action = action_of(name)
        await self.perform(action, self._aim(action.target))

    async def perform(self, action: Action, key: str | None) -> None:
        """Show the question, and return once keys answer it.

        One question at a time: an answer would answer the next one too.
        """
        if isinstance(self.screen, Question):
            return
        if self.calls is None or key is None:
            why_not = _why_not(action) if self.calls else "a recording cannot be changed"
            self.notify(f"{action.label}: {why_not}", severity="warning", markup=False)
            return
        pending = PendingAction(action, self.calls, key, holder(self.model, action, key))
        first = question(pending, self.model, self.machine)
        if first is None:
            self._begin(pending, "")
        else:
            await self.push_screen(first, partial(self._begin, pending))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable actions without service or target, and tabs under a dialog."""
        if action == "show":
            return not isinstance(self.screen, ModalScreen)
        if action != "act":
            return True
        chosen_action = action_of(str(parameters[0]))
        can_do = self.calls is not None and self._aim(chosen_action.target) is not None
        return True if can_do else None

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """List every action and every screen, then Textual's own commands."""
        for action in ACTIONS:
            key = self._aim(action.target)
            aim = f"{action.target} {printable(key or '', 60)}".strip()
            # The palette reads its titles as markup.
            yield SystemCommand(
                f"{action.title or action.label}: {escape(aim)}",
                action.help,
                partial(self.perform, action, key),
            )
        for mode in MODES:
            yield SystemCommand(
                f"Show {mode}",
                f"Go to the {mode} screen.",
                partial(self.run_action, f"show('{mode}')"),
            )
        yield from super().get_system_commands(screen)

    def _aim(self, target: ActionTarget) -> str | None:
        """Target of the screen, else the one chosen on another screen."""
        boards = (screen for screen in self.screen_stack if isinstance(screen, BaseScreen))
        aims = [aim for board in boards if (aim := board.aim(target)) is not None]
        return aims[-1] if aims else self.chosen.get(target)

    def _begin(self, pending: PendingAction, answer: str | None) -> None:
        """Run in the background, unless the slot has another context now."""
        if answer is None:
            return
        if holder(self.model, pending.action, pending.key) != pending.holder:
            reason = f"{pending.action.label}: not done, slot {pending.key} has another agent now"
            self.notify(reason, severity="warning", markup=False)
            return
        context = ActionContext(pending.calls, self.copy_to_clipboard, self.machine)
        self.run_worker(run_action(self, pending.action, context, Aim(pending.key, answer)))

    def _hand_over(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, BaseScreen):
                screen.model = self.model


def _why_not(action: Action) -> str:
    if action.target is ActionTarget.MACHINE:
        return "this can be done on the computer of the service only"
    return "choose a row first"
