"""Is it healthy, who is busy, who waits?"""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from mlxstack.tui.actions import ActionTarget
from mlxstack.tui.screens.base import BaseScreen, keys_of
from mlxstack.tui.views import overview
from mlxstack.tui.widgets.sparkline import DECODE, PREFILL, SparklineChart
from mlxstack.tui.widgets.text_lines import TextLines
from mlxstack.tui.widgets.titled_table import TitledTable

OURS = frozenset({ActionTarget.SLOT, ActionTarget.SERVICE, ActionTarget.MACHINE})


class OverviewScreen(BaseScreen):
    """Health, speed, slots, queue."""

    MODE = "overview"
    TARGETS = OURS
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(OURS)]
    EXPLAINS = (
        "The first line tells how the service is: its model, how long it is up, how much of the "
        "KV budget is taken, and how many requests wait.\n\n"
        "The charts show tokens per second of all slots together: on the left prompt tokens "
        "that had to be computed, on the right generated ones. Reused tokens cost nothing and "
        "are not in them.\n\n"
        "A slot is a seat in the running batch. `context` is how many tokens it holds of how "
        "many it could, `reused` the share of its last prompt that was not computed again, "
        "`idle` how long nobody used it.\n\n"
        "In the queue the first one is seated next; waiting raises its rank."
    )

    def compose_body(self) -> Iterable[Widget]:
        """Health, charts, totals, slots, queue."""
        yield TextLines(overview.health, "health").data_bind(model=BaseScreen.model)
        with Horizontal(id="charts"):
            yield SparklineChart(PREFILL, "prefill").data_bind(model=BaseScreen.model)
            yield SparklineChart(DECODE, "decode").data_bind(model=BaseScreen.model)
        yield TextLines(overview.totals, "totals").data_bind(model=BaseScreen.model)
        slots = TitledTable(overview.slots, "slots", target=ActionTarget.SLOT)
        yield slots.data_bind(model=BaseScreen.model)
        yield TitledTable(overview.queue, "queue").data_bind(model=BaseScreen.model)
