"""Screens of agents: all of them, and one with its turns."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from mlxstack.core.status import AgentView
from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.screens.base import BaseScreen, keys_of
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import agents
from mlxstack.tui.views.table_data import CellStyle, Line, TableData, TextCell
from mlxstack.tui.widgets.text_lines import TextLines
from mlxstack.tui.widgets.titled_table import TitledTable

DrawAgent = Callable[[AgentView, DashboardState, int], TableData]


class AgentsScreen(BaseScreen):
    """All of them; enter shows one."""

    MODE = "agents"
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(ActionTarget.AGENT)]
    HELP = "agents"

    def compose_body(self) -> Iterable[Widget]:
        yield TitledTable(agents.agents, "agents", target=ActionTarget.AGENT)

    async def open(self, section: str, key: str) -> None:
        """Drill into one agent."""
        del section
        await show_agent(self, self._feed, key)


class AgentScreen(BaseScreen):
    """One agent, turn by turn."""

    MODE = "agents"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back", id="back"),
        *keys_of(ActionTarget.AGENT),
    ]
    HELP = "agent"

    def __init__(self, feed: str, name: str) -> None:
        super().__init__(feed)
        self._agent = name

    def aim(self, target: ActionTarget) -> str | None:
        """This agent, wherever the cursor of the list goes meanwhile."""
        if target is ActionTarget.AGENT:
            return self._agent
        return None

    def compose_body(self) -> Iterable[Widget]:
        yield TextLines(self._portrait, "portrait")
        for draw in (agents.states, agents.turns):
            yield TitledTable(partial(self._table, draw), draw.__name__)

    def _portrait(self, model: DashboardState, _: int) -> tuple[Line, ...]:
        agent = agents.agent(model, self._agent)
        if agent:
            return agents.portrait(agent, model.frame.titles.get(agent.id, ""))
        return ((TextCell("This agent is gone.", CellStyle.WARN),),)

    def _table(self, draw: DrawAgent, model: DashboardState, width: int) -> TableData:
        agent = agents.agent(model, self._agent) or AgentView(self._agent)
        return draw(agent, model, width)


async def show_agent(screen: BaseScreen, feed: str, name: str) -> None:
    """Show one agent over the screen; returns once it takes keys."""
    agent_screen = AgentScreen(feed, name)
    is_mounted = screen.app.push_screen(agent_screen)
    agent_screen.model = screen.model
    await is_mounted
