"""Is it healthy, who is busy, who waits?"""

from mlxstack.core.engine_snapshot import RequestPhase, SlotView, WaitingView
from mlxstack.core.formatting import printable, size
from mlxstack.core.request import Priority
from mlxstack.tui.state import DashboardState, LinkState, decode_rate, prompt_rate
from mlxstack.tui.views.formatting import (
    NONE,
    bar,
    of_size,
    rate,
    share,
    short_time,
    span,
    starred,
    tokens,
)
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableColumn,
    TableData,
    TableRow,
    TextCell,
    fitted,
    title,
)

PRIORITIES = {
    Priority.HIGH: CellStyle.WARN,
    Priority.NORMAL: CellStyle.PLAIN,
    Priority.LOW: CellStyle.FAINT,
}
HEALTH = {
    "ok": CellStyle.GOOD,
    "loading": CellStyle.BUSY,
    "swapping": CellStyle.BUSY,
    "stopping": CellStyle.WARN,
}
CONTEXT_BAR = 8
WIDE = 112
MANY = 256


def banner(model: DashboardState) -> str:
    """What is wrong with the feed; empty when nothing is."""
    link = model.link
    if link.state is LinkState.LIVE:
        return ""
    if link.state is LinkState.CONNECTING:
        return "Waiting for the first word of the service."
    why = printable(link.why, MANY)
    if link.retry_s <= 0:
        return f"{why}."
    seen = "What you see is the last that was known. " if model.has_frame else ""
    return f"Disconnected: {why}. {seen}Next try in {short_time(link.retry_s)}."


def health(model: DashboardState, width: int) -> tuple[Line, ...]:
    """One line about the service."""
    facts, snapshot = model.frame.service, model.frame.snapshot
    if not model.has_frame:
        return ((TextCell("nothing seen yet", CellStyle.FAINT),),)
    budget = facts.budget_bytes
    kv = f"KV {size(snapshot.kv_bytes)}"
    if budget:
        drawn = bar(snapshot.kv_bytes, budget, 12 if width >= WIDE else 4)
        kv = f"KV {drawn} {of_size(snapshot.kv_bytes, budget)}"
    is_full = budget and snapshot.kv_bytes > 0.85 * budget
    parts = [
        TextCell(printable(facts.health), HEALTH.get(facts.health, CellStyle.BAD)),
        TextCell(printable(facts.model, 60 if width >= WIDE else 17), CellStyle.STRONG),
        *([TextCell(printable(facts.mode, 12))] if facts.mode else []),
        TextCell(f"up {span(facts.uptime_s)}"),
        TextCell(kv, CellStyle.WARN if is_full else CellStyle.PLAIN),
        _queue(len(snapshot.waiting), facts.max_waiting),
    ]
    if width >= WIDE:
        parts.insert(2, TextCell(f"preset {printable(facts.preset, 30)}", CellStyle.FAINT))
        parts.append(TextCell(f"MLX {size(snapshot.active_bytes)}", CellStyle.FAINT))
    return (joined(parts), *_decoding(model))


def totals(model: DashboardState, width: int) -> tuple[Line, ...]:
    """The counters since the start, as /metrics has them."""
    now = model.frame.snapshot.counters
    n_all = now.n_prompt_tokens + now.n_cached_tokens
    told = (
        f"in {tokens(now.n_prompt_tokens)} + {tokens(now.n_cached_tokens)} reused"
        f" ({share(now.n_cached_tokens, n_all)})"
    )
    rows = now.n_decode_rows / now.n_decode_calls if now.n_decode_calls else 0.0
    parts = [TextCell(told), TextCell(f"out {tokens(now.n_generated_tokens)}")]
    parts += [TextCell(f"{now.n_completed} done")]
    parts += [
        TextCell(f"{n} {what}", CellStyle.WARN)
        for n, what in (
            (now.n_cancelled, "cancelled"),
            (now.n_failed, "failed"),
            (now.n_refused, "refused"),
        )
        if n
    ]
    if width >= WIDE:
        parts.append(TextCell(f"{tokens(now.n_model_calls)} model calls"))
        parts.append(TextCell(f"{rows:.1f} rows per step"))
    return (joined(parts),)


def speed(model: DashboardState) -> tuple[Line, Line]:
    """What stands over the two charts: prefill, decode."""
    return (
        (
            TextCell("prefill ", CellStyle.FAINT),
            TextCell(f"{rate(prompt_rate(model))} tok/s", CellStyle.STRONG),
        ),
        (
            TextCell("decode ", CellStyle.FAINT),
            TextCell(f"{rate(decode_rate(model))} tok/s", CellStyle.STRONG),
        ),
    )


def slots(model: DashboardState, width: int) -> TableData:
    """Every slot: who sits there, how full it is, how fast it goes."""
    views = model.frame.snapshot.slots
    is_wide = width >= WIDE
    n_busy = sum(is_active(view) for view in views)
    columns = (
        TableColumn("slot", 4, is_right=True),
        TableColumn("agent", 14 if is_wide else 10, is_wide=True),
        TableColumn("state", 11),
        TableColumn("context", 21 if is_wide else 20),
        TableColumn("tok/s", 5, is_right=True),
        TableColumn("reused", 6, is_right=True),
        TableColumn("idle", 6, is_right=True),
        *(
            (
                TableColumn("out", 6, is_right=True),
                TableColumn("memory", 9, is_right=True),
                TableColumn("last miss", 10, is_wide=True),
            )
            if is_wide
            else ()
        ),
    )
    return TableData(
        title("Slots", f"{n_busy} of {len(views)} busy" if views else ""),
        fitted(columns, width),
        tuple(TableRow(str(view.id), _slot(view, model, is_wide)) for view in views),
        "No slots yet: the model is being loaded." if model.has_frame else "",
    )


def queue(model: DashboardState, width: int) -> TableData:
    """Who waits, in which order, for how long."""
    waiting = model.frame.snapshot.waiting
    columns = (
        TableColumn("#", 3, is_right=True),
        TableColumn("agent", 10, is_wide=True),
        TableColumn("priority", 8),
        TableColumn("prompt", 7, is_right=True),
        TableColumn("waits", 7, is_right=True),
        TableColumn("for", 8),
        TableColumn("request", 16, is_wide=True),
    )
    rows = tuple(
        TableRow(view.request, _waiting(i, view, model.frame.snapshot_age_s))
        for i, view in enumerate(waiting, 1)
    )
    note = "Nobody waits." if model.has_frame else ""
    return TableData(title("Queue"), fitted(columns, width), rows, note)


def joined(parts: list[TextCell]) -> Line:
    """Cells with dots between them."""
    line: list[TextCell] = []
    for part in parts:
        line += [TextCell(" · ", CellStyle.FAINT), part] if line else [part]
    return tuple(line)


def is_active(view: SlotView) -> bool:
    """Whether somebody is served in it."""
    return view.state in (RequestPhase.PREFILLING, RequestPhase.RUNNING)


def state(view: SlotView) -> TextCell:
    """What a slot does, in a word."""
    if view.state is RequestPhase.RUNNING:
        return TextCell("running", CellStyle.GOOD)
    if view.state is RequestPhase.PREFILLING:
        return TextCell(f"prefill {share(view.n_done, view.n_prompt)}", CellStyle.BUSY)
    return TextCell("idle" if view.n_tokens else "empty", CellStyle.FAINT)


def _slot(view: SlotView, model: DashboardState, is_wide: bool) -> tuple[TextCell, ...]:
    used, room = tokens(view.n_tokens), tokens(view.n_ctx)
    drawn = bar(view.n_tokens, view.n_ctx, CONTEXT_BAR)
    is_full = view.n_tokens > 0.9 * view.n_ctx
    idle_s = view.idle_s + model.frame.snapshot_age_s
    cells = (
        TextCell(str(view.id)),
        TextCell(starred(view.agent or NONE, is_pinned=_is_pinned(view, model))),
        state(view),
        TextCell(f"{drawn} {used}/{room}", CellStyle.WARN if is_full else CellStyle.PLAIN),
        TextCell(rate(view.tps) if is_active(view) else NONE),
        TextCell(share(view.n_cached, view.n_prompt)),
        TextCell(NONE if is_active(view) or not view.is_used else span(idle_s)),
    )
    if not is_wide:
        return cells
    miss = f"{view.miss.reason}" if view.miss else NONE
    return (
        *cells,
        TextCell(tokens(view.n_decoded)),
        TextCell(size(view.n_bytes)),
        TextCell(printable(miss, 80), CellStyle.FAINT),
    )


def _is_pinned(view: SlotView, model: DashboardState) -> bool:
    agents = model.frame.agents or ()
    return any(agent.is_pinned for agent in agents if agent.id == view.agent)


def _waiting(place: int, view: WaitingView, age_s: float) -> tuple[TextCell, ...]:
    return (
        TextCell(str(place)),
        TextCell(printable(view.agent or NONE, 60)),
        TextCell(view.priority.name.lower(), PRIORITIES[view.priority]),
        TextCell(tokens(view.n_prompt)),
        TextCell(span(view.waited_s + age_s)),
        TextCell("any slot" if view.pin is None else f"slot {view.pin}"),
        TextCell(printable(view.request, 60), CellStyle.FAINT),
    )


def _queue(n: int, limit: int) -> TextCell:
    of = f"/{limit}" if limit else ""
    return TextCell(f"queue {n}{of}", CellStyle.WARN if n else CellStyle.PLAIN)


def _decoding(model: DashboardState) -> tuple[Line, ...]:
    snapshot = model.frame.snapshot
    if snapshot.is_batching:
        return ()
    why = printable(snapshot.why_not_batching or "the preset says so", MANY)
    return ((TextCell(f"decoding slot by slot: {why}", CellStyle.WARN),),)
