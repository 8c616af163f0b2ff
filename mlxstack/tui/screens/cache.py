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
    EXPLAINS = (
        "A prefix that was computed once is kept in memory and on disk, and reused for "
        "every request that begins with it. A star marks what is pinned.\n\n"
        "`hits` counts requests that reused anything, `of tokens` the share of all prompt tokens "
        "that were not computed. `time saved` is what computing them would have taken.\n\n"
        "A miss tells why a request computed more than it had to, and the seconds and tokens it "
        "lost; the largest loss is on top. With `diverged`, the texts "
        "show where the prompt stopped being what the cache holds: usually a date, a counter or "
        "a reordered list near the start. Enter shows all of it."
    )

    def compose_body(self) -> Iterable[Widget]:
        """Budgets, rates, prefixes, misses."""
        yield TextLines(cache.budget, "budget")
        yield TitledTable(cache.rates, "rates")
        yield TitledTable(cache.prefixes, "prefixes", target=ActionTarget.PREFIX)
        yield TitledTable(cache.misses, "misses")

    async def open(self, section: str, key: str) -> None:
        """All of one miss."""
        one = cache.miss(self.model, key) if section == "misses" else None
        if one is not None:
            await self.app.push_screen(TextPage("Why", miss_lines(one)))
