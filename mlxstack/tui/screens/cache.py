"""What is remembered, what did it save, and why was something computed again?"""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from mlxstack.tui.deeds import Target
from mlxstack.tui.screens.board import Board, keys_of
from mlxstack.tui.screens.page import Page
from mlxstack.tui.views import cache
from mlxstack.tui.views.requests import miss_lines
from mlxstack.tui.widgets.lines import Lines
from mlxstack.tui.widgets.section import Section

OURS = frozenset({Target.PREFIX, Target.CACHE})


class Cache(Board):
    """Budgets, hit rates, prefixes, misses."""

    MODE = "cache"
    TARGETS = OURS
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(OURS)]
    EXPLAINS = (
        "A prefix that was computed once is kept in memory and on disk, and given to whoever "
        "sends it again. A star marks what is pinned.\n\n"
        "`hits` counts requests that reused anything, `of tokens` the share of all prompt tokens "
        "that were not computed. `time saved` is what computing them would have taken.\n\n"
        "A miss tells why a request computed more than it had to. With `diverged`, the texts "
        "show where the prompt stopped being what the cache holds: usually a date, a counter or "
        "a reordered list near the start. Enter shows all of it."
    )

    def parts(self) -> Iterable[Widget]:
        """Budgets, rates, prefixes, misses."""
        yield Lines(cache.budget, "budget").data_bind(model=Board.model)
        yield Section(cache.rates, "rates").data_bind(model=Board.model)
        prefixes = Section(cache.prefixes, "prefixes", target=Target.PREFIX)
        yield prefixes.data_bind(model=Board.model)
        yield Section(cache.misses, "misses").data_bind(model=Board.model)

    async def open(self, section: str, key: str) -> None:
        """All of one miss."""
        one = cache.miss(self.model, key) if section == "misses" else None
        if one is not None:
            await self.app.push_screen(Page("Why", miss_lines(one)))
