"""The first screen: health, tiles, live requests, and what cost time."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.containers import Container, Horizontal
from textual.widget import Widget

from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.screens.agents import show_agent
from mlxstack.tui.screens.base import BaseScreen, keys_of
from mlxstack.tui.screens.requests import why_page
from mlxstack.tui.views import agents, cache, costs, overview, requests, tiles
from mlxstack.tui.views.first_tokens import first_tokens
from mlxstack.tui.widgets.sparkline import DECODE, PREFILL, SparklineChart
from mlxstack.tui.widgets.text_lines import TextLines, TileBox
from mlxstack.tui.widgets.titled_table import TitledTable

TARGETS = (ActionTarget.SLOT, ActionTarget.SERVICE, ActionTarget.MACHINE)


class OverviewScreen(BaseScreen):
    """Health, tiles, charts, slots, queue, costs; more tables where there is room."""

    MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(*TARGETS)]
    HELP = "overview"

    def compose_body(self) -> Iterable[Widget]:
        yield TextLines(overview.health, "health")
        with Container(id="tiles"):
            for draw in tiles.TILES:
                yield TileBox(draw, f"tile-{draw.__name__}")
        with Horizontal(id="charts"):
            yield SparklineChart(PREFILL, "prefill")
            yield SparklineChart(DECODE, "decode")
        yield TextLines(overview.totals, "totals")
        with Container(id="firsts"):
            yield TextLines(first_tokens, "first-tokens")
        yield TextLines(overview.hint, "hint")
        with Container(id="body"):
            yield TitledTable(overview.slots, "slots", target=ActionTarget.SLOT)
            yield TitledTable(overview.queue, "queue")
            yield TitledTable(costs.costs, "costs")
            yield TitledTable(cache.prefixes, "shared")
            yield TitledTable(agents.agents, "everyone")
            yield TitledTable(requests.requests, "finished")

    async def open(self, section: str, key: str) -> None:
        """Explain a finished request, or show an agent."""
        if section == "everyone":
            await show_agent(self, self._feed, key)
        request = requests.request(self.model, key)
        if section in {"costs", "finished"} and request is not None:
            await self.app.push_screen(why_page(request))
