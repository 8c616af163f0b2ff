"""Losses now and of the last ten minutes, ranked by seconds."""

from msgspec import Struct

from mlxstack.core.engine_snapshot import RequestPhase, SlotView, WaitingView
from mlxstack.core.formatting import age, count, printable, short_time, span
from mlxstack.core.status import MissView, RequestView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import CellStyle, TableData, TableRow, TextCell, tabulated, title

WIDE = 112
WINDOW_S = 600.0
MIN_S = 1.0
MAX_TEXT = 24


class Cost(Struct, frozen=True):
    """Seconds that a request lost; no age while it runs."""

    request: str
    agent: str | None
    lost_s: float
    why: str
    age_s: float | None = None


def costs(model: DashboardState, width: int) -> TableData:
    """Losses now, then those of the last ten minutes, the largest first."""
    columns = f"lost >6, agent {24 if width >= WIDE else 14}~, why *38, age >6"
    found = ranked(model)
    rows = [TableRow(one.request, _row(one, model)) for one in found]
    now, past = (
        span(sum(one.lost_s for one in found if (one.age_s is None) is is_now))
        for is_now in (True, False)
    )
    sums = f"now {now}, ten minutes {past}, enter explains"
    head = title("What cost time", sums if rows else "")
    note = "" if not model.has_frame else "No request lost a second in the last ten minutes."
    return tabulated(head, columns, rows, width, note)


def ranked(model: DashboardState) -> tuple[Cost, ...]:
    """Running requests, then finished ones, each by seconds lost."""
    recent = (one for one in model.frame.requests or () if one.age_s <= WINDOW_S)
    found = [*_live(model), *(cost for one in recent for cost in _of(one))]
    lasting = (one for one in found if one.lost_s >= MIN_S)
    return tuple(sorted(lasting, key=lambda one: (one.age_s is not None, -one.lost_s)))


def reason(miss: MissView) -> str:
    """A miss in words: what changed where, and what can be done."""
    n_lost = f"{count(miss.n_lost)} tokens" if miss.n_lost else "tokens"
    match miss.reason:
        case "diverged":
            place = "" if miss.at is None else f" at token {miss.at}"
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
    before = printable(miss.text_cached, MAX_TEXT)
    now = printable(miss.text_sent, MAX_TEXT)
    return f": `{before}` -> `{now}`"


def _live(model: DashboardState) -> list[Cost]:
    snapshot = model.frame.snapshot
    late_s = model.frame.snapshot_age_s
    waits = [_wait(view, late_s) for view in snapshot.waiting]
    # The queue lists the others.
    longest = sorted(waits, key=lambda one: -one.lost_s)[:1]
    return longest + [
        _recomputation(view, late_s)
        for view in snapshot.slots
        if view.state is RequestPhase.PREFILLING and view.miss is not None and view.miss.n_lost
    ]


def _wait(view: WaitingView, late_s: float) -> Cost:
    place = "all slots are busy" if view.pin is None else f"slot {view.pin} is busy"
    return Cost(view.request, view.agent, view.waited_s + late_s, place)


def _recomputation(view: SlotView, late_s: float) -> Cost:
    """Share of a running prefill that the cache once held."""
    assert view.miss is not None
    miss = MissView(view.miss.reason, view.miss.at, n_lost=view.miss.n_lost)
    share = min(1.0, view.miss.n_lost / max(1, view.n_prompt - view.n_cached))
    lost_s = (view.elapsed_s + late_s) * share
    return Cost(view.request or "", view.agent, lost_s, reason(miss))


def _of(one: RequestView) -> list[Cost]:
    found = [
        Cost(one.id, one.agent, one.queued_s, "waited for a free slot", one.age_s),
        Cost(one.id, one.agent, one.others_s, "waited for other prompts", one.age_s),
        Cost(one.id, one.agent, one.beside_s, "waited for decode steps of others", one.age_s),
    ]
    if one.miss is not None:
        found.append(Cost(one.id, one.agent, one.miss.lost_s, reason(one.miss), one.age_s))
    return found


def _row(one: Cost, model: DashboardState) -> tuple[TextCell, ...]:
    return (
        TextCell(short_time(one.lost_s), CellStyle.WARN),
        TextCell(agent_name(model, one.agent)),
        TextCell(one.why),
        TextCell("now", CellStyle.BUSY)
        if one.age_s is None
        else TextCell(age(one.age_s), CellStyle.FAINT),
    )
