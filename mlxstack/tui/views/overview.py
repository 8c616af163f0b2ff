"""The first screen: health, speed, slots, queue."""

from mlxstack.core.engine_events import CacheMiss
from mlxstack.core.engine_snapshot import RequestPhase, SlotView, WaitingView
from mlxstack.core.formatting import NONE, age, count, printable, share, short_time, size, span
from mlxstack.core.formatting import tokens as context_length
from mlxstack.core.request import Priority
from mlxstack.core.status import LoadView
from mlxstack.host.coding_clients import first_command
from mlxstack.tui.state import DashboardState, LinkState, decode_rate, prompt_rate, reuse_rate
from mlxstack.tui.views import tiles
from mlxstack.tui.views.formatting import bar, images, of_size, rate
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableData,
    TableRow,
    TextCell,
    tabulated,
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
    "unloaded": CellStyle.FAINT,
    "stopping": CellStyle.WARN,
}
WIDE = tiles.WIDE
MANY = 256
N_BAR = 6


def banner(model: DashboardState) -> str:
    """Trouble of the feed; empty while it is live."""
    link = model.link
    if link.state is LinkState.LIVE:
        return ""
    if link.state is LinkState.CONNECTING:
        return "Waiting for the first frame of the service."
    why = printable(link.why, MANY)
    if link.retry_s <= 0:
        return f"{why}."
    seen = "The screen shows the last frame. " if model.has_frame else ""
    return f"Disconnected: {why}. {seen}Next try in {short_time(link.retry_s)}."


def health(model: DashboardState, width: int) -> tuple[Line, ...]:
    """One line about the service."""
    facts = model.frame.service
    snapshot = model.frame.snapshot
    if not model.has_frame:
        return ((TextCell("no frame yet", CellStyle.FAINT),),)
    load = (loading(model.frame.loading, width),) if model.frame.loading is not None else ()
    if load and facts.health != "ok":
        return load
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
    ]
    if width >= WIDE:
        parts.insert(2, TextCell(f"preset {printable(facts.preset, 30)}", CellStyle.FAINT))
        parts.append(TextCell(f"MLX {size(snapshot.active_bytes)}", CellStyle.FAINT))
    return (joined(parts), *load, *_decoding(model))


def loading(view: LoadView, width: int) -> Line:
    """Progress of a load: bar, GiB, time left."""
    doing = "downloading" if view.is_download else "loading"
    name = TextCell(f"{doing} {printable(view.model, 40)} ", CellStyle.BUSY)
    elapsed = f"{span(view.elapsed_s)} so far"
    if not view.n_total:
        return (name, TextCell(elapsed))
    drawn = bar(view.n_done, view.n_total, 24 if width >= WIDE else 12)
    left = view.elapsed_s * (view.n_total / view.n_done - 1) if view.n_done else None
    eta = f", ETA {span(left)}" if left is not None else ""
    return (name, TextCell(f"{drawn} {of_size(view.n_done, view.n_total)}, {elapsed}{eta}"))


def hint(model: DashboardState, width: int) -> tuple[Line, ...]:
    """The command that sends a first request, while none has arrived."""
    del width
    counters = model.frame.snapshot.counters
    snapshot = model.frame.snapshot
    is_idle = not (snapshot.waiting or any(view.is_used for view in snapshot.slots))
    if counters.n_asks or not is_idle or model.frame.service.health != "ok":
        return ()
    command = TextCell(first_command(model.frame.service.n_ctx), CellStyle.STRONG)
    return ((TextCell("No request yet. Start one in another terminal: "), command),)


def totals(model: DashboardState, width: int) -> tuple[Line, ...]:
    """The counters since the start, as /metrics has them."""
    now = model.frame.snapshot.counters
    n_all = now.n_prompt_tokens + now.n_cached_tokens
    told = (
        f"in {count(now.n_prompt_tokens)} + {count(now.n_cached_tokens)} reused"
        f" ({share(now.n_cached_tokens, n_all)})"
    )
    rows = now.n_decode_rows / now.n_decode_calls if now.n_decode_calls else 0.0
    parts = [TextCell(told), TextCell(f"out {count(now.n_generated_tokens)}")]
    parts += [TextCell(f"{now.n_completed} done")]
    if now.n_image_encodes:
        parts.append(TextCell(f"{now.n_image_encodes} images encoded"))
    parts += [
        TextCell(f"{n} {what}", CellStyle.WARN)
        for n, what in (
            (now.n_cancelled, "cancelled"),
            (now.n_failed, "failed"),
            (now.n_refused, "refused"),
        )
        if n
    ]
    if width >= WIDE and not (now.n_cancelled or now.n_failed or now.n_refused):
        parts.append(TextCell(f"{count(now.n_model_calls)} model calls"))
        parts.append(TextCell(f"{rows:.1f} rows per step"))
    return (joined(parts),)


def speed(model: DashboardState) -> tuple[Line, Line]:
    """Headings of the charts: prefill with reuse, decode."""
    return (
        (
            TextCell("█ computed ", CellStyle.BUSY),
            TextCell(f"{rate(prompt_rate(model))} ", CellStyle.STRONG),
            TextCell("▓ reused ", CellStyle.REUSED),
            TextCell(f"{rate(reuse_rate(model))} tok/s", CellStyle.STRONG),
        ),
        (
            TextCell("█ generated ", CellStyle.GOOD),
            TextCell(f"{rate(decode_rate(model))} tok/s", CellStyle.STRONG),
        ),
    )


def slots(model: DashboardState, width: int) -> TableData:
    """Slots with their requests: agent, state, context, reuse, time, miss."""
    views = model.frame.snapshot.slots
    n_busy = sum(is_active(view) for view in views)
    columns = (
        f"slot >4, agent *12~, state 33, context {N_BAR + 6}, reused >6, "
        "images 14?@116, elapsed >7@96, memory >9@126, why not more *12@100"
    )
    each = f", {context_length(views[0].n_ctx)} tokens each" if views else ""
    head = title("Slots", f"{n_busy} of {len(views)} busy{each}" if views else "")
    rows = (TableRow(str(view.id), _slot(view, model)) for view in views)
    note = "No slots yet: the model is being loaded." if model.has_frame else ""
    return tabulated(head, columns, rows, width, note)


def queue(model: DashboardState, width: int) -> TableData:
    """Waiting requests in their order, and what each waits for."""
    columns = "agent *12~, waits for *31, since >7, prompt >7, priority 8"
    waiting = enumerate(model.frame.snapshot.waiting)
    rows = (TableRow(view.request, _waiting(i, view, model)) for i, view in waiting)
    note = "No request waits." if model.has_frame else ""
    return tabulated(title("Queue"), columns, rows, width, note)


def waits_for(n_ahead: int, view: WaitingView, model: DashboardState) -> str:
    """Describe the slot a request waits for."""
    if view.pin is not None:
        slot = next((one for one in model.frame.snapshot.slots if one.id == view.pin), None)
        behind = f" behind {agent_name(model, slot.agent)}" if slot and is_active(slot) else ""
        return f"slot {view.pin}{behind}"
    return "a free slot" + (f", {n_ahead} ahead" if n_ahead else ", next")


def joined(parts: list[TextCell]) -> Line:
    """Cells with dots between them."""
    line: list[TextCell] = []
    for part in parts:
        line += [TextCell(" · ", CellStyle.FAINT), part] if line else [part]
    return tuple(line)


def is_active(view: SlotView) -> bool:
    """Whether a slot serves a request."""
    return view.state in (RequestPhase.PREFILLING, RequestPhase.RUNNING)


def state(view: SlotView, model: DashboardState) -> TextCell:
    """State of a slot in words, early turns included."""
    if view.state is RequestPhase.RUNNING:
        told = f"writing, {count(view.n_decoded)} tokens, {rate(view.tps)} tok/s"
        return TextCell(told, CellStyle.GOOD)
    if view.is_reading:
        return TextCell("reading KV from disk", CellStyle.BUSY)
    if view.state is RequestPhase.PREFILLING:
        eta_s = tiles.eta(tiles.n_to_compute(view), model)
        done = f"prefill {count(view.n_done)} of {count(view.n_prompt)}"
        left = f", ETA {span(eta_s)}" if eta_s is not None else ""
        return TextCell(done + left, CellStyle.BUSY)
    if view.n_early:
        n_all = count(view.n_early + view.n_early_left)
        return TextCell(f"begun early, {count(view.n_early)} of {n_all}", CellStyle.REUSED)
    if not view.n_tokens:
        return TextCell("empty", CellStyle.FAINT)
    idle = f"idle {age(view.idle_s + model.frame.snapshot_age_s)}" if view.is_used else "idle"
    return TextCell(idle, CellStyle.FAINT)


def _slot(view: SlotView, model: DashboardState) -> tuple[TextCell, ...]:
    is_full = view.n_tokens > 0.9 * view.n_ctx
    name = agent_name(model, view.agent)
    elapsed = span(view.elapsed_s + model.frame.snapshot_age_s) if is_active(view) else NONE
    context = f"{bar(view.n_tokens, view.n_ctx, N_BAR)} {count(view.n_tokens):>5}"
    miss = printable(_why(view.miss), 80) if view.miss else NONE
    return (
        TextCell(str(view.id)),
        TextCell(f"* {name}" if _is_pinned(view, model) else name),
        state(view, model),
        TextCell(context, CellStyle.WARN if is_full else CellStyle.PLAIN),
        TextCell(
            share(view.n_cached, view.n_prompt),
            CellStyle.REUSED if view.n_cached else CellStyle.PLAIN,
        ),
        TextCell(images(view.n_images, view.n_images_computed)),
        TextCell(elapsed),
        TextCell(size(view.n_bytes)),
        TextCell(miss, CellStyle.FAINT),
    )


def _why(miss: CacheMiss) -> str:
    """Reason of a miss, and the token from which it lost some."""
    if miss.n_lost and miss.at is not None:
        return f"{miss.reason} at {miss.at}"
    return miss.reason


def _is_pinned(view: SlotView, model: DashboardState) -> bool:
    agents = model.frame.agents or ()
    return any(agent.is_pinned for agent in agents if agent.id == view.agent)


def _waiting(n_ahead: int, view: WaitingView, model: DashboardState) -> tuple[TextCell, ...]:
    return (
        TextCell(agent_name(model, view.agent)),
        TextCell(waits_for(n_ahead, view, model)),
        TextCell(span(view.waited_s + model.frame.snapshot_age_s)),
        TextCell(count(view.n_prompt)),
        TextCell(view.priority.name.lower(), PRIORITIES[view.priority]),
    )


def _decoding(model: DashboardState) -> tuple[Line, ...]:
    snapshot = model.frame.snapshot
    lines: list[Line] = []
    if snapshot.draft_model is not None:
        name = printable(snapshot.draft_model, MANY)
        lines.append((TextCell(f"drafting with {name}", CellStyle.FAINT),))
    if not snapshot.is_batching:
        why = printable(snapshot.why_not_batching or "the preset says so", MANY)
        lines.append((TextCell(f"decoding slot by slot: {why}", CellStyle.WARN),))
    return tuple(lines)
