"""The prefix cache: budget, hit rates, prefixes, misses."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.screens.base import BaseScreen, keys_of
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.views import cache
from mlxstack.tui.views.requests import miss_lines
from mlxstack.tui.widgets.text_lines import TextLines
from mlxstack.tui.widgets.titled_table import TitledTable


class CacheScreen(BaseScreen):
    """Budgets, hit rates, prefixes, misses."""

    MODE = "cache"
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(ActionTarget.PREFIX, ActionTarget.CACHE)]
    HELP = "cache"

    def compose_body(self) -> Iterable[Widget]:
        yield TextLines(cache.budget, "budget")
        yield TitledTable(cache.rates, "rates")
        yield TitledTable(cache.prefixes, "prefixes", target=ActionTarget.PREFIX)
        yield TitledTable(cache.misses, "misses")

    async def open(self, section: str, key: str) -> None:
        """All of one miss."""
        miss = cache.miss(self.model, key)
        if section == "misses" and miss is not None:
            await self.app.push_screen(TextPage("Why", miss_lines(miss)))
