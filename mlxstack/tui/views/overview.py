"""The first screen: health, speed, slots, queue."""

from msgspec import Struct

from mlxstack.core.engine_snapshot import RequestPhase, SlotView, WaitingView
from mlxstack.core.formatting import NONE, age, count, printable, share, short_time, size, span
from mlxstack.core.formatting import tokens as context_length
from mlxstack.core.request import Priority, TurnKind
from mlxstack.core.status import LoadView
from mlxstack.core.usage import UsageSums
from mlxstack.host.coding_clients import first_command
from mlxstack.tui.state import DashboardState, LinkState, decode_rate, prompt_rate, reuse_rate
from mlxstack.tui.views import tiles
from mlxstack.tui.views.formatting import bar, images, of_size, rate
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import (
    WIDE,
    CellStyle,
    Column,
    DrawContext,
    Line,
    TableData,
    TextCell,
    number,
    percentage,
    starred,
    tabulated,
    title,
    warned,
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
MAX_TEXT = 256
N_BAR = 6


def banner(model: DashboardState) -> str:
    """Trouble of the feed; empty while it is live."""
    link = model.link
    if link.state is LinkState.LIVE:
        return ""
    if link.state is LinkState.CONNECTING:
        return "Waiting for the first frame of the service."
    reason = printable(link.reason, MAX_TEXT)
    if link.retry_s <= 0:
        return f"{reason}."
    text = f"Disconnected: {reason}."
    if model.has_frame:
        text += " The screen shows the last frame."
    return f"{text} Next try in {short_time(link.retry_s)}."


def health(model: DashboardState, width: int) -> tuple[Line, ...]:
    """One line about the service."""
    facts = model.frame.service
    snapshot = model.frame.snapshot
    if not model.has_frame:
        return ((TextCell("no frame yet", CellStyle.FAINT),),)
    load: tuple[Line, ...] = ()
    if model.frame.loading is not None:
        load = (loading(model.frame.loading, width),)
        if facts.health != "ok":
            return load
    is_wide = width >= WIDE
    parts = [
        TextCell(printable(facts.health), HEALTH.get(facts.health, CellStyle.BAD)),
        TextCell(printable(facts.model, 60 if is_wide else 17), CellStyle.STRONG),
    ]
    if is_wide:
        parts.append(TextCell(f"preset {printable(facts.preset, 30)}", CellStyle.FAINT))
    if facts.mode:
        parts.append(TextCell(printable(facts.mode, 12)))
    parts.append(TextCell(f"up {span(facts.uptime_s)}"))
    parts.append(_kv(model, 12 if is_wide else 4))
    if is_wide:
        parts.append(TextCell(f"MLX {size(snapshot.active_bytes)}", CellStyle.FAINT))
    return (joined(parts), *load, *_decoding(model))


def _kv(model: DashboardState, n_bar: int) -> TextCell:
    """Bytes of live KV, against their budget where there is one."""
    kv_bytes = model.frame.snapshot.kv_bytes
    budget = model.frame.service.budget_bytes
    if not budget:
        return TextCell(f"KV {size(kv_bytes)}")
    text = f"KV {bar(kv_bytes, budget, n_bar)} {of_size(kv_bytes, budget)}"
    return warned(text, kv_bytes > 0.85 * budget)


def loading(view: LoadView, width: int) -> Line:
    """Progress of a load: bar, GiB, time left."""
    verb = "loading"
    if view.is_download:
        verb = "downloading"
    name = TextCell(f"{verb} {printable(view.model, 40)} ", CellStyle.BUSY)
    elapsed = f"{span(view.elapsed_s)} so far"
    if not view.n_total:
        return (name, TextCell(elapsed))
    drawn = bar(view.n_done, view.n_total, 24 if width >= WIDE else 12)
    text = f"{drawn} {of_size(view.n_done, view.n_total)}, {elapsed}"
    if view.n_done:
        text += f", ETA {span(view.elapsed_s * (view.n_total / view.n_done - 1))}"
    return (name, TextCell(text))


def hint(model: DashboardState, width: int) -> tuple[Line, ...]:
    """The command that sends a first request, while none has arrived."""
    del width
    counters = model.frame.snapshot.counters
    snapshot = model.frame.snapshot
    is_idle = not (snapshot.waiting or any(view.is_used for view in snapshot.slots))
    if counters.n_requests or not is_idle or model.frame.service.health != "ok":
        return ()
    command = TextCell(first_command(model.frame.service.n_ctx), CellStyle.STRONG)
    return ((TextCell("No request yet. Start one in another terminal: "), command),)


def totals(model: DashboardState, width: int) -> tuple[Line, ...]:
    """The counters since the start, as /metrics has them."""
    now = model.frame.snapshot.counters
    n_all = now.n_prompt_tokens + now.n_cached_tokens
    prompts = (
        f"in {count(now.n_prompt_tokens)} + {count(now.n_cached_tokens)} reused"
        f" ({share(now.n_cached_tokens, n_all)})"
    )
    rows = now.n_decode_rows / max(1, now.n_decode_calls)
    parts = [
        TextCell(prompts),
        TextCell(f"out {count(now.n_generated_tokens)}"),
        TextCell(f"{now.n_completed} done"),
    ]
    if now.n_image_encodes:
        parts.append(TextCell(f"{now.n_image_encodes} images encoded"))
    ends = {"cancelled": now.n_cancelled, "failed": now.n_failed, "refused": now.n_refused}
    parts += [TextCell(f"{n} {end}", CellStyle.WARN) for end, n in ends.items() if n]
    if width >= WIDE and not any(ends.values()):
        parts.append(TextCell(f"{count(now.n_model_calls)} model calls"))
        parts.append(TextCell(f"{rows:.1f} rows per step"))
    lines = [joined(parts)]
    today = model.frame.today
    if today is not None and today.n_requests:
        lines.append(_today(today))
    return tuple(lines)


def _today(sums: UsageSums) -> Line:
    """Sums of the day, of all services of the home."""
    return joined(
        [
            TextCell(f"today {count(sums.n_read)} read, {count(sums.n_cached)} reused"),
            TextCell(f"{count(sums.n_generated)} written"),
            TextCell(f"{span(sums.saved_s)} saved", CellStyle.GOOD),
            TextCell(f"{sums.price:.2f} at list price", CellStyle.FAINT),
        ]
    )


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


def _agent_of_slot(view: SlotView, context: DrawContext) -> TextCell:
    name = agent_name(context.model, view.agent)
    return starred(name, _is_pinned(view, context.model))


def _context(view: SlotView, _: DrawContext) -> TextCell:
    text = f"{bar(view.n_tokens, view.n_ctx, N_BAR)} {count(view.n_tokens):>5}"
    return warned(text, view.n_tokens > 0.9 * view.n_ctx)


def _elapsed(view: SlotView, context: DrawContext) -> TextCell:
    if is_active(view):
        return TextCell(span(view.elapsed_s + context.model.frame.snapshot_age_s))
    return TextCell(NONE)


def _miss(view: SlotView, _: DrawContext) -> TextCell:
    """Reason of a miss, and the token from which it lost some."""
    miss = view.miss
    text = NONE
    if miss:
        text = miss.reason
        if miss.n_lost and miss.at is not None:
            text = f"{miss.reason} at {miss.at}"
    return TextCell(printable(text, 80), CellStyle.FAINT)


def _is_pinned(view: SlotView, model: DashboardState) -> bool:
    agents = model.frame.agents or ()
    return any(agent.is_pinned for agent in agents if agent.id == view.agent)


SLOTS: tuple[Column[SlotView], ...] = (
    number("slot", 4, lambda view: view.id, str),
    Column("agent", 12, _agent_of_slot, grows=True, is_cut_inside=True),
    Column("state", 33, lambda view, context: state(view, context.model)),
    Column("context", N_BAR + 6, _context, lambda view: view.n_tokens),
    percentage(
        "reused", 6, lambda view: view.n_cached, lambda view: view.n_prompt, tone=CellStyle.REUSED
    ),
    Column(
        "images",
        14,
        lambda view, _: TextCell(images(view.n_images, view.n_images_computed)),
        lambda view: view.n_images or None,
        is_optional=True,
        min_screen=116,
    ),
    Column(
        "elapsed",
        7,
        _elapsed,
        lambda view: view.elapsed_s if is_active(view) else None,
        is_right=True,
        min_screen=96,
    ),
    number("memory", 9, lambda view: view.n_bytes, size, min_screen=126),
    Column("why not more", 12, _miss, grows=True, min_screen=100),
)


class QueuedRequest(Struct, frozen=True):
    """Waiting request, and how many wait before it."""

    n_ahead: int
    view: WaitingView


def _since(row: QueuedRequest, context: DrawContext) -> TextCell:
    return TextCell(span(row.view.waited_s + context.model.frame.snapshot_age_s))


QUEUE: tuple[Column[QueuedRequest], ...] = (
    Column(
        "agent",
        12,
        lambda row, context: TextCell(agent_name(context.model, row.view.agent)),
        grows=True,
        is_cut_inside=True,
    ),
    Column(
        "waits for",
        31,
        lambda row, context: TextCell(waits_for(row.n_ahead, row.view, context.model)),
        grows=True,
    ),
    Column("since", 7, _since, lambda row: row.view.waited_s, is_right=True),
    number("prompt", 7, lambda row: row.view.n_prompt),
    Column(
        "priority",
        8,
        lambda row, _: TextCell(row.view.priority.name.lower(), PRIORITIES[row.view.priority]),
    ),
    Column(
        "turn", 9, lambda row, _: TextCell(_turn_kind(row.view), CellStyle.FAINT), is_optional=True
    ),
)


def _turn_kind(view: WaitingView) -> str:
    """Kind of a turn that no person waits for; else empty."""
    return "" if view.turn_kind is TurnKind.PERSON else view.turn_kind.value


def slots(model: DashboardState, width: int) -> TableData:
    """Slots with their requests: agent, state, context, reuse, time, miss."""
    views = model.frame.snapshot.slots
    summary = ""
    if views:
        n_busy = sum(is_active(view) for view in views)
        summary = f"{n_busy} of {len(views)} busy, {context_length(views[0].n_ctx)} tokens each"
    rows = [(str(view.id), view) for view in views]
    note = ""
    if model.has_frame:
        note = "No slots yet: the model is being loaded."
    return tabulated(title("Slots", summary), SLOTS, rows, DrawContext(model, width), note)


def queue(model: DashboardState, width: int) -> TableData:
    """Waiting requests in their order, and what each waits for."""
    waiting = enumerate(model.frame.snapshot.waiting)
    rows = [(view.request, QueuedRequest(i, view)) for i, view in waiting]
    note = ""
    if model.has_frame:
        note = "No request waits."
    return tabulated(title("Queue"), QUEUE, rows, DrawContext(model, width), note)


def waits_for(n_ahead: int, view: WaitingView, model: DashboardState) -> str:
    """Describe the slot a request waits for."""
    if view.pin is not None:
        pinned = (slot for slot in model.frame.snapshot.slots if slot.id == view.pin)
        slot = next(pinned, None)
        if slot and is_active(slot):
            return f"slot {view.pin} behind {agent_name(model, slot.agent)}"
        return f"slot {view.pin}"
    if n_ahead:
        return f"a free slot, {n_ahead} ahead"
    return "a free slot, next"


def joined(parts: list[TextCell]) -> Line:
    """Cells with dots between them."""
    line: list[TextCell] = []
    for part in parts:
        if line:
            line.append(TextCell(" · ", CellStyle.FAINT))
        line.append(part)
    return tuple(line)


def is_active(view: SlotView) -> bool:
    """Whether a slot serves a request."""
    return view.state in (RequestPhase.PREFILLING, RequestPhase.RUNNING)


def state(view: SlotView, model: DashboardState) -> TextCell:
    """State of a slot in words, early turns included."""
    if view.state is RequestPhase.RUNNING:
        text = f"writing, {count(view.n_decoded)} tokens, {rate(view.tps)} tok/s"
        return TextCell(text, CellStyle.GOOD)
    if view.is_reading:
        return TextCell("reading KV from disk", CellStyle.BUSY)
    if view.state is RequestPhase.PREFILLING:
        eta_s = tiles.eta(tiles.n_to_compute(view), model)
        text = f"prefill {count(view.n_done)} of {count(view.n_prompt)}"
        if eta_s is not None:
            text += f", ETA {span(eta_s)}"
        return TextCell(text, CellStyle.BUSY)
    if view.n_early:
        n_all = count(view.n_early + view.n_early_left)
        return TextCell(f"begun early, {count(view.n_early)} of {n_all}", CellStyle.REUSED)
    if not view.n_tokens:
        return TextCell("empty", CellStyle.FAINT)
    text = "idle"
    if view.is_used:
        text = f"idle {age(view.idle_s + model.frame.snapshot_age_s)}"
    return TextCell(text, CellStyle.FAINT)


def _decoding(model: DashboardState) -> tuple[Line, ...]:
    snapshot = model.frame.snapshot
    lines: list[Line] = []
    if snapshot.draft_model is not None:
        name = printable(snapshot.draft_model, MAX_TEXT)
        lines.append((TextCell(f"drafting with {name}", CellStyle.FAINT),))
    if not snapshot.is_batching:
        reason = printable(snapshot.why_not_batching or "the preset says so", MAX_TEXT)
        lines.append((TextCell(f"decoding slot by slot: {reason}", CellStyle.WARN),))
    return tuple(lines)
