"""Losses of the last ten minutes, ranked by seconds."""

from msgspec import Struct

from mlxstack.core.formatting import printable
from mlxstack.core.status import MissView, RequestView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import age, short_time, span, tokens
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import (
    CellStyle,
    TableColumn,
    TableData,
    TableRow,
    TextCell,
    fitted,
    title,
)

WIDE = 112
WINDOW_S = 600.0
LEAST_S = 0.05
MOST_TEXT = 24


class Cost(Struct, frozen=True):
    """Seconds that a request lost, and why."""

    request: str
    agent: str | None
    lost_s: float
    why: str
    age_s: float


def costs(model: DashboardState, width: int) -> TableData:
    """Losses of the last ten minutes, the largest first."""
    columns = (
        TableColumn("lost", 6, is_right=True),
        TableColumn("agent", 24 if width >= WIDE else 14),
        TableColumn("why", 38, is_wide=True),
        TableColumn("age", 6, is_right=True),
    )
    found = ranked(model)
    rows = tuple(TableRow(one.request, _row(one, model)) for one in found)
    total = span(sum(one.lost_s for one in found))
    head = title("What cost time", f"{total} in ten minutes, enter explains" if rows else "")
    note = "" if not model.has_frame else "Nothing lost time in the last ten minutes."
    return TableData(head, fitted(columns, width), rows, note)


def ranked(model: DashboardState) -> tuple[Cost, ...]:
    """Misses and waits of finished requests, by seconds lost."""
    recent = (one for one in model.frame.requests or () if one.age_s <= WINDOW_S)
    found = [cost for one in recent for cost in _of(one)]
    return tuple(sorted(found, key=lambda one: -one.lost_s))


def reason(miss: MissView) -> str:
    """A miss in words: what changed where, and what can be done."""
    n_lost = f"{tokens(miss.n_lost)} tokens" if miss.n_lost else "tokens"
    match miss.reason:
        case "diverged":
            place = "" if miss.at is None else f" at token {miss.at:,}"
            return f"prompt changed{place}{_change(miss)}"
        case "evicted":
            return f"{n_lost} were evicted; raise prefix_cache.memory_budget_pct"
        case "no checkpoint":
            return f"{n_lost} had no checkpoint to go on from"
        case "disabled":
            return "the request asked for no cache (cache_prompt: false)"
    return printable(miss.reason, 60)


def _change(miss: MissView) -> str:
    if not (miss.text_cached or miss.text_sent):
        return ""
    before, now = printable(miss.text_cached, MOST_TEXT), printable(miss.text_sent, MOST_TEXT)
    return f": `{before}` -> `{now}`"


def _of(one: RequestView) -> list[Cost]:
    found = []
    if one.miss is not None and one.miss.lost_s >= LEAST_S:
        found.append(Cost(one.id, one.agent, one.miss.lost_s, reason(one.miss), one.age_s))
    if one.queued_s >= LEAST_S:
        found.append(Cost(one.id, one.agent, one.queued_s, "waited for a free slot", one.age_s))
    return found


def _row(one: Cost, model: DashboardState) -> tuple[TextCell, ...]:
    return (
        TextCell(short_time(one.lost_s), CellStyle.WARN),
        TextCell(agent_name(model, one.agent)),
        TextCell(one.why),
        TextCell(age(one.age_s), CellStyle.FAINT),
    )
