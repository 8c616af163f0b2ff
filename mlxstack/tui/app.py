"""The dashboard: a feed folded into a model, and screens over it."""

from collections.abc import Iterable
from contextlib import aclosing
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
from mlxstack.tui.deeds import DEEDS, Action, ActionTarget, LocalMachine, ServiceCalls, action_of
from mlxstack.tui.feed import Feed
from mlxstack.tui.help import help_lines
from mlxstack.tui.run_action import PendingAction, holder, question, run_action
from mlxstack.tui.screens.agents import AgentsScreen
from mlxstack.tui.screens.base import BaseScreen
from mlxstack.tui.screens.cache import CacheScreen
from mlxstack.tui.screens.dialogs import Question
from mlxstack.tui.screens.overview import OverviewScreen
from mlxstack.tui.screens.palette import Palette
from mlxstack.tui.screens.requests import RequestsScreen
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.state import DashboardState, reduce
from mlxstack.tui.theme import HOUSE, ThemeChoice
from mlxstack.tui.widgets.tabs import MODES
from mlxstack.tui.widgets.text_input import LineInput
from mlxstack.tui.widgets.titled_table import TitledTable

BOARDS: dict[str, type[BaseScreen]] = {
    board.MODE: board for board in (OverviewScreen, CacheScreen, AgentsScreen, RequestsScreen)
}


class Updated(Message):
    """The model after another frame. A newer one replaces it: stale frames are not drawn."""

    def __init__(self, model: DashboardState) -> None:
        super().__init__()
        self.model = model

    def can_replace(self, message: Message) -> bool:
        """Any later model knows more."""
        return isinstance(message, Updated)


class Dashboard(App[None]):
    """`calls` does what a person asks for; None when there is only a tape to look at.

    `machine` is the computer of the service, when it is this one.
    """

    TITLE = "mlx-stack"
    CSS_PATH = "dashboard.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-low"), (18, "-short"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(i), f"show('{mode}')", mode.capitalize(), show=False, id=mode)
            for i, mode in enumerate(MODES, 1)
        ),
        Binding("question_mark", "explain", "Help", id="help", key_display="?"),
        Binding("q", "quit", "Quit", id="quit"),
    ]

    def __init__(
        self,
        feed: Feed,
        calls: ServiceCalls | None,
        look: ThemeChoice,
        machine: LocalMachine | None = None,
    ) -> None:
        super().__init__()
        self.register_theme(HOUSE)
        self.theme = look.theme if look.theme in self.available_themes else HOUSE.name
        self.model = DashboardState()
        self.calls = calls
        self.machine = machine
        always = (
            ActionTarget.SERVICE,
            ActionTarget.CACHE,
            *((ActionTarget.MACHINE,) if machine else ()),
        )
        self.chosen = dict.fromkeys(always, "")
        self._feed = feed
        self._look = look
        for mode, board in BOARDS.items():
            self.add_mode(mode, partial(board, feed.name))

    async def on_mount(self) -> None:
        """Show the first screen, follow the feed."""
        self.theme_changed_signal.subscribe(self, lambda theme: self._look.choose(theme.name))
        await self.action_show(MODES[0])
        self.run_worker(self._follow(), name="feed")

    async def on_event(self, event: Event) -> None:
        """Keys act one after the other: over a network they come in bursts.

        The toolkit sends a key to the widget that has the focus, and it acts when it comes back
        from there: what was typed after it would have gone to the same widget by then.
        """
        if not (isinstance(event, Key | Paste) and await self._acted(event)):
            await super().on_event(event)

    async def _acted(self, event: Key | Paste) -> bool:
        """Whether that was a key with a meaning, or text for a question."""
        if not self.screen_stack:
            return True  # Who leaves has no screen any more.
        if event.is_forwarded:
            return False
        self.app_focus, line = True, self.focused
        if self.screen.maximized or (isinstance(line, Input) and not isinstance(line, LineInput)):
            return False
        if isinstance(event, Key) and (found := self.screen.active_bindings.get(event.key)):
            return found.enabled and await self.run_action(found.binding.action, found.node)
        return isinstance(line, LineInput) and line.took(event)

    async def _follow(self) -> None:
        model = self.model
        try:
            async with aclosing(self._feed.news()) as feed:
                async for news in feed:
                    model = reduce(model, news)
                    self.post_message(Updated(model))
        except OSError as why:  # Services have no such errors: it is the tape's.
            self.exit(return_code=1, message=f"error: the tape cannot be written: {why.strerror}")

    def on_updated(self, message: Updated) -> None:
        """Hand the model to every screen that can be seen."""
        self.model = message.model
        with self.batch_update():
            self._hand_over()

    def on_titled_table_row_chosen(self, message: TitledTable.RowChosen) -> None:
        """The cursor of some table moved: deeds aim there, from other screens too."""
        if message.key is None:
            self.chosen.pop(message.target, None)
        else:
            self.chosen[message.target] = message.key
        if self.screen_stack:
            self.refresh_bindings()

    async def action_show(self, mode: str) -> None:
        """Another screen, with what is known now."""
        await self.switch_mode(mode)
        self._hand_over()

    def action_explain(self) -> None:
        """What is to be seen here, and what can be done."""
        if isinstance(self.screen, BaseScreen):
            self.push_screen(TextPage("Help", help_lines(self.screen.EXPLAINS)))

    def action_command_palette(self) -> None:
        """All that can be done."""
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette())

    async def action_deed(self, name: str) -> None:
        """Do something to what is chosen, after asking."""
        action = action_of(name)
        await self.perform(action, self._aim(action.target))

    async def perform(self, action: Action, key: str | None) -> None:
        """Returns when the question is on the screen: keys that follow are meant for it.

        One question at a time: an answer would answer the next one too.
        """
        if isinstance(self.screen, Question):
            return
        if self.calls is None or key is None:
            why_not = _why_not(action) if self.calls else "a tape cannot be changed"
            self.notify(f"{action.label}: {why_not}", severity="warning", markup=False)
            return
        pending = PendingAction(
            action, self.calls, key, holder(self.model, action, key), self.machine
        )
        first = question(pending, self.model)
        if first is None:
            self._begin(pending, "")
        else:
            await self.push_screen(first, partial(self._begin, pending))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Deeds need a service and something to do them to; a question comes first."""
        if action == "show":
            return not isinstance(self.screen, ModalScreen)
        if action != "deed":
            return True
        chosen_action = action_of(str(parameters[0]))
        can_do = self.calls is not None and self._aim(chosen_action.target) is not None
        return True if can_do else None

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every deed and every screen, then the toolkit's own."""
        for action in DEEDS:
            key = self._aim(action.target)
            aim = f"{action.target} {printable(key or '', 60)}".strip()
            # The palette reads its titles as markup.
            yield SystemCommand(
                f"{action.label}: {escape(aim)}", action.help, partial(self.perform, action, key)
            )
        for mode in MODES:
            yield SystemCommand(
                f"Show {mode}",
                f"Go to the {mode} screen.",
                partial(self.run_action, f"show('{mode}')"),
            )
        yield from super().get_system_commands(screen)

    def _aim(self, target: ActionTarget) -> str | None:
        """What the screen is about, or else what was chosen on another one."""
        boards = (screen for screen in self.screen_stack if isinstance(screen, BaseScreen))
        aims = [aim for board in boards if (aim := board.aim(target)) is not None]
        return aims[-1] if aims else self.chosen.get(target)

    def _begin(self, pending: PendingAction, words: str | None) -> None:
        """In the background: the dashboard goes on. What was asked about is what it is done to."""
        if words is None:
            return
        if holder(self.model, pending.action, pending.key) != pending.holder:
            told = (
                f"{pending.action.label}: nothing was done, slot {pending.key} is another's by now"
            )
            self.notify(told, severity="warning", markup=False)
            return
        self.run_worker(run_action(self, pending, words))

    def _hand_over(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, BaseScreen):
                screen.model = self.model


def _why_not(action: Action) -> str:
    if action.target is ActionTarget.MACHINE:
        return "this can be done on the computer of the service only"
    return "choose a row first"
