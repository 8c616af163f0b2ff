"""Is it healthy, who is busy, who waits?"""

from mlxstack.core.ask import Priority
from mlxstack.core.snapshot import AskState, SlotView, WaitingView
from mlxstack.tui.model import LinkState, Model, decode_rate, prompt_rate
from mlxstack.tui.views.figures import (
    NONE,
    bar,
    of_size,
    printable,
    rate,
    share,
    short_time,
    size,
    span,
    starred,
    tokens,
)
from mlxstack.tui.views.sheet import Cell, Column, Line, Row, Sheet, Tone, fitted, title

PRIORITIES = {Priority.HIGH: Tone.WARN, Priority.NORMAL: Tone.PLAIN, Priority.LOW: Tone.FAINT}
HEALTH = {"ok": Tone.GOOD, "loading": Tone.BUSY, "swapping": Tone.BUSY, "stopping": Tone.WARN}
CONTEXT_BAR = 8
WIDE = 112
MANY = 256


def banner(model: Model) -> str:
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


def health(model: Model, width: int) -> tuple[Line, ...]:
    """One line about the service."""
    facts, snapshot = model.frame.service, model.frame.snapshot
    if not model.has_frame:
        return ((Cell("nothing seen yet", Tone.FAINT),),)
    budget = facts.budget_bytes
    kv = f"KV {size(snapshot.kv_bytes)}"
    if budget:
        drawn = bar(snapshot.kv_bytes, budget, 12 if width >= WIDE else 4)
        kv = f"KV {drawn} {of_size(snapshot.kv_bytes, budget)}"
    is_full = budget and snapshot.kv_bytes > 0.85 * budget
    parts = [
        Cell(printable(facts.health), HEALTH.get(facts.health, Tone.BAD)),
        Cell(printable(facts.model, 60 if width >= WIDE else 17), Tone.STRONG),
        *([Cell(printable(facts.mode, 12))] if facts.mode else []),
        Cell(f"up {span(facts.uptime_s)}"),
        Cell(kv, Tone.WARN if is_full else Tone.PLAIN),
        _queue(len(snapshot.waiting), facts.max_waiting),
    ]
    if width >= WIDE:
        parts.insert(2, Cell(f"preset {printable(facts.preset, 30)}", Tone.FAINT))
        parts.append(Cell(f"MLX {size(snapshot.active_bytes)}", Tone.FAINT))
    return (joined(parts), *_decoding(model))


def totals(model: Model, width: int) -> tuple[Line, ...]:
    """The counters since the start, as /metrics has them."""
    now = model.frame.snapshot.counters
    n_all = now.n_prompt_tokens + now.n_cached_tokens
    told = (
        f"in {tokens(now.n_prompt_tokens)} + {tokens(now.n_cached_tokens)} reused"
        f" ({share(now.n_cached_tokens, n_all)})"
    )
    rows = now.n_decode_rows / now.n_decode_calls if now.n_decode_calls else 0.0
    parts = [Cell(told), Cell(f"out {tokens(now.n_generated_tokens)}")]
    parts += [Cell(f"{now.n_completed} done")]
    parts += [
        Cell(f"{n} {what}", Tone.WARN)
        for n, what in (
            (now.n_cancelled, "cancelled"),
            (now.n_failed, "failed"),
            (now.n_refused, "refused"),
        )
        if n
    ]
    if width >= WIDE:
        parts.append(Cell(f"{tokens(now.n_model_calls)} model calls"))
        parts.append(Cell(f"{rows:.1f} rows per step"))
    return (joined(parts),)


def speed(model: Model) -> tuple[Line, Line]:
    """What stands over the two charts: prefill, decode."""
    return (
        (Cell("prefill ", Tone.FAINT), Cell(f"{rate(prompt_rate(model))} tok/s", Tone.STRONG)),
        (Cell("decode ", Tone.FAINT), Cell(f"{rate(decode_rate(model))} tok/s", Tone.STRONG)),
    )


def slots(model: Model, width: int) -> Sheet:
    """Every slot: who sits there, how full it is, how fast it goes."""
    views = model.frame.snapshot.slots
    is_wide = width >= WIDE
    n_busy = sum(is_active(view) for view in views)
    columns = (
        Column("slot", 4, is_right=True),
        Column("agent", 14 if is_wide else 10, is_wide=True),
        Column("state", 11),
        Column("context", 21 if is_wide else 20),
        Column("tok/s", 5, is_right=True),
        Column("reused", 6, is_right=True),
        Column("idle", 6, is_right=True),
        *(
            (
                Column("out", 6, is_right=True),
                Column("memory", 9, is_right=True),
                Column("last miss", 10, is_wide=True),
            )
            if is_wide
            else ()
        ),
    )
    return Sheet(
        title("Slots", f"{n_busy} of {len(views)} busy" if views else ""),
        fitted(columns, width),
        tuple(Row(str(view.id), _slot(view, model, is_wide)) for view in views),
        "No slots yet: the model is being loaded." if model.has_frame else "",
    )


def queue(model: Model, width: int) -> Sheet:
    """Who waits, in which order, for how long."""
    waiting = model.frame.snapshot.waiting
    columns = (
        Column("#", 3, is_right=True),
        Column("agent", 10, is_wide=True),
        Column("priority", 8),
        Column("prompt", 7, is_right=True),
        Column("waits", 7, is_right=True),
        Column("for", 8),
        Column("request", 16, is_wide=True),
    )
    rows = tuple(
        Row(view.ask, _waiting(i, view, model.frame.snapshot_age_s))
        for i, view in enumerate(waiting, 1)
    )
    note = "Nobody waits." if model.has_frame else ""
    return Sheet(title("Queue"), fitted(columns, width), rows, note)


def joined(parts: list[Cell]) -> Line:
    """Cells with dots between them."""
    line: list[Cell] = []
    for part in parts:
        line += [Cell(" · ", Tone.FAINT), part] if line else [part]
    return tuple(line)


def is_active(view: SlotView) -> bool:
    """Whether somebody is served in it."""
    return view.state in (AskState.PREFILLING, AskState.RUNNING)


def state(view: SlotView) -> Cell:
    """What a slot does, in a word."""
    if view.state is AskState.RUNNING:
        return Cell("running", Tone.GOOD)
    if view.state is AskState.PREFILLING:
        return Cell(f"prefill {share(view.n_done, view.n_prompt)}", Tone.BUSY)
    return Cell("idle" if view.n_tokens else "empty", Tone.FAINT)


def _slot(view: SlotView, model: Model, is_wide: bool) -> tuple[Cell, ...]:
    used, room = tokens(view.n_tokens), tokens(view.n_ctx)
    drawn = bar(view.n_tokens, view.n_ctx, CONTEXT_BAR)
    is_full = view.n_tokens > 0.9 * view.n_ctx
    idle_s = view.idle_s + model.frame.snapshot_age_s
    cells = (
        Cell(str(view.id)),
        Cell(starred(view.agent or NONE, is_pinned=_is_pinned(view, model))),
        state(view),
        Cell(f"{drawn} {used}/{room}", Tone.WARN if is_full else Tone.PLAIN),
        Cell(rate(view.tps) if is_active(view) else NONE),
        Cell(share(view.n_cached, view.n_prompt)),
        Cell(NONE if is_active(view) or not view.is_used else span(idle_s)),
    )
    if not is_wide:
        return cells
    miss = f"{view.miss.reason}" if view.miss else NONE
    return (
        *cells,
        Cell(tokens(view.n_decoded)),
        Cell(size(view.n_bytes)),
        Cell(printable(miss, 80), Tone.FAINT),
    )


def _is_pinned(view: SlotView, model: Model) -> bool:
    agents = model.frame.agents or ()
    return any(agent.is_pinned for agent in agents if agent.id == view.agent)


def _waiting(place: int, view: WaitingView, age_s: float) -> tuple[Cell, ...]:
    return (
        Cell(str(place)),
        Cell(printable(view.agent or NONE, 60)),
        Cell(view.priority.name.lower(), PRIORITIES[view.priority]),
        Cell(tokens(view.n_prompt)),
        Cell(span(view.waited_s + age_s)),
        Cell("any slot" if view.pin is None else f"slot {view.pin}"),
        Cell(printable(view.ask, 60), Tone.FAINT),
    )


def _queue(n: int, limit: int) -> Cell:
    of = f"/{limit}" if limit else ""
    return Cell(f"queue {n}{of}", Tone.WARN if n else Tone.PLAIN)


def _decoding(model: Model) -> tuple[Line, ...]:
    snapshot = model.frame.snapshot
    if snapshot.is_batching:
        return ()
    why = printable(snapshot.why_not_batching or "the preset says so", MANY)
    return ((Cell(f"decoding slot by slot: {why}", Tone.WARN),),)
