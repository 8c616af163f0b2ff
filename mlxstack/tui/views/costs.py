"""Losses now and of the last ten minutes, ranked by seconds."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.engine_snapshot import RequestPhase, SlotView, WaitingView
from mlxstack.core.formatting import age, count, printable, short_time, span
from mlxstack.core.status import MissView, RequestView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import (
    WIDE,
    CellStyle,
    Column,
    DrawContext,
    TableData,
    TextCell,
    number,
    tabulated,
    title,
)

WINDOW_S = 600.0
MIN_S = 1.0
MAX_TEXT = 24


class Cost(Struct, frozen=True):
    """Seconds that a request lost; no age while it runs."""

    request: str
    agent: str | None
    lost_s: float
    reason: str
    age_s: float | None = None


def _age(cost: Cost, _: DrawContext) -> TextCell:
    if cost.age_s is None:
        return TextCell("now", CellStyle.BUSY)
    return TextCell(age(cost.age_s), CellStyle.FAINT)


AGENT: Column[Cost] = Column(
    "agent",
    14,
    lambda cost, context: TextCell(agent_name(context.model, cost.agent)),
    is_cut_inside=True,
)
COSTS: tuple[Column[Cost], ...] = (
    number("lost", 6, lambda cost: cost.lost_s, short_time, tone=CellStyle.WARN),
    AGENT,
    Column("why", 38, lambda cost, _: TextCell(cost.reason), grows=True),
    Column("age", 6, _age, lambda cost: cost.age_s, is_right=True),
)
WIDE_COSTS = (COSTS[0], replace(AGENT, width=24), *COSTS[2:])


def costs(model: DashboardState, width: int) -> TableData:
    """Losses now, then those of the last ten minutes, the largest first."""
    ranking = ranked(model)
    now_s = sum(cost.lost_s for cost in ranking if cost.age_s is None)
    past_s = sum(cost.lost_s for cost in ranking if cost.age_s is not None)
    head = title("What cost time")
    if ranking:
        summary = f"now {span(now_s)}, ten minutes {span(past_s)}, enter explains"
        head = title("What cost time", summary)
    note = ""
    if model.has_frame:
        note = "No request lost a second in the last ten minutes."
    columns = WIDE_COSTS if width >= WIDE else COSTS
    rows = [(cost.request, cost) for cost in ranking]
    return tabulated(head, columns, rows, DrawContext(model, width), note)


def ranked(model: DashboardState) -> tuple[Cost, ...]:
    """Running requests, then finished ones, each by seconds lost."""
    losses = _live(model)
    for request in model.frame.requests or ():
        if request.age_s <= WINDOW_S:
            losses += _of(request)
    lasting = [cost for cost in losses if cost.lost_s >= MIN_S]
    return tuple(sorted(lasting, key=lambda cost: (cost.age_s is not None, -cost.lost_s)))


def reason(miss: MissView) -> str:
    """A miss in words: what changed where, and what can be done."""
    n_lost = "tokens"
    if miss.n_lost:
        n_lost = f"{count(miss.n_lost)} tokens"
    match miss.reason:
        case "diverged":
            if miss.at is None:
                return f"prompt changed{_change(miss)}"
            return f"prompt changed at token {miss.at}{_change(miss)}"
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
    longest = sorted(waits, key=lambda wait: -wait.lost_s)[:1]
    return longest + [
        _recomputation(view, late_s)
        for view in snapshot.slots
        if view.state is RequestPhase.PREFILLING and view.miss is not None and view.miss.n_lost
    ]


def _wait(view: WaitingView, late_s: float) -> Cost:
    text = "all slots are busy"
    if view.pin is not None:
        text = f"slot {view.pin} is busy"
    return Cost(view.request, view.agent, view.waited_s + late_s, text)


def _recomputation(view: SlotView, late_s: float) -> Cost:
    """Share of a running prefill that the cache once held."""
    assert view.miss is not None
    miss = MissView(view.miss.reason, view.miss.at, n_lost=view.miss.n_lost)
    share = min(1.0, view.miss.n_lost / max(1, view.n_prompt - view.n_cached))
    lost_s = (view.elapsed_s + late_s) * share
    return Cost(view.request or "", view.agent, lost_s, reason(miss))


def _of(request: RequestView) -> list[Cost]:
    causes = [
        (request.queued_s, "waited for a free slot"),
        (request.others_s, "waited for other prompts"),
        (request.beside_s, "waited for decode steps of others"),
    ]
    if request.miss is not None:
        causes.append((request.miss.lost_s, reason(request.miss)))
    return [Cost(request.id, request.agent, lost_s, text, request.age_s) for lost_s, text in causes]
