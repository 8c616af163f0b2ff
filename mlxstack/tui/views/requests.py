"""Finished requests: their times, headers and misses."""

from mlxstack.core.formatting import age, count, printable, short_time
from mlxstack.core.request import TurnKind
from mlxstack.core.status import MissView, RequestView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import phases
from mlxstack.tui.views.formatting import images
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
    tabulated,
    title,
)

NOT_YET = "This service does not report its finished requests yet."
BAD = frozenset({"failed", "refused"})
HEADER = "x-mlx-stack-"
N_BAR = 18
N_WIDE_BAR = 64


def _tone(request: RequestView) -> CellStyle:
    if request.loops or request.repeated_call:
        return CellStyle.WARN
    return CellStyle.BAD if request.ended in BAD else CellStyle.PLAIN


def _phases(request: RequestView, context: DrawContext) -> TextCell:
    bar = phases.bar(request, N_BAR, context.largest)
    return TextCell("".join(cell.text for cell in bar))


REQUESTS: tuple[Column[RequestView], ...] = (
    number("age", 6, lambda request: request.age_s, age),
    Column(
        "agent",
        14,
        lambda request, context: TextCell(agent_name(context.model, request.agent), _tone(request)),
        grows=True,
        is_cut_inside=True,
    ),
    number("prompt", 6, lambda request: request.n_prompt),
    percentage(
        "reused",
        6,
        lambda request: request.n_cached,
        lambda request: request.n_prompt,
        tone=CellStyle.GOOD,
        zero_tone=CellStyle.FAINT,
    ),
    number("out", 5, lambda request: request.n_generated),
    number("ttft", 6, lambda request: request.ttft_s, short_time),
    Column("phases", N_BAR, _phases, phases.total_s),
    number("queue", 6, lambda request: request.queued_s, short_time, min_screen=144),
    number("prefill", 7, lambda request: request.prefill_s, short_time, min_screen=144),
    number("decode", 6, lambda request: request.decode_s, short_time, min_screen=144),
    Column(
        "images",
        14,
        lambda request, _: TextCell(images(request.n_images, request.n_images_computed)),
        lambda request: request.n_images or None,
        is_optional=True,
        min_screen=126,
    ),
    number("saved", 7, lambda request: request.saved_s or None, short_time, min_screen=112),
    number("slot", 4, lambda request: request.slot, str, min_screen=112),
    Column("from", 6, lambda request, _: TextCell(request.source.value), min_screen=112),
    Column(
        "ended",
        9,
        lambda request, _: TextCell(printable(request.ended, 12), _tone(request)),
        min_screen=112,
    ),
)


def requests(model: DashboardState, width: int) -> TableData:
    """The last finished requests, the latest first."""
    finished = model.frame.requests or ()
    longest_s = max(map(phases.total_s, finished), default=0.0)
    rows = [(request.id, request) for request in finished]
    note = "No request has finished yet."
    if model.frame.requests is None:
        note = NOT_YET
    head = title("Requests")
    if rows:
        summary = "enter: why"
        if width >= WIDE:
            summary = f"the last {len(rows)}, enter tells why"
        head = title("Requests", f"{summary}  {phases.LEGEND}")
    return tabulated(head, REQUESTS, rows, DrawContext(model, width, longest_s), note)


def request(model: DashboardState, name: str) -> RequestView | None:
    """Find a request by its id."""
    return next((view for view in model.frame.requests or () if view.id == name), None)


def why(request: RequestView) -> tuple[Line, ...]:
    """Details of one request: times and miss."""
    facts = [("saved by reuse", f"{short_time(request.saved_s):>6}")]
    if request.n_images:
        facts.append(("images", images(request.n_images, request.n_images_computed)))
    if request.thinking is not None:
        facts.append(("thinking", printable(request.thinking.description, 100)))
    lines: list[Line] = [
        (
            TextCell(printable(request.id, 70), CellStyle.STRONG),
            TextCell(f"  ended: {printable(request.ended)}"),
        ),
        (TextCell("  "), *phases.bar(request, N_WIDE_BAR)),
        *phases.rows(request),
    ]
    facts += [("ended repetition", printable(str(stop), 70)) for stop in request.loops]
    if request.repeated_call:
        facts.append(("repeated call", printable(str(request.repeated_call), 70)))
    for name, text in facts:
        lines.append((TextCell(f"    {name:<26}", CellStyle.FAINT), TextCell(text)))
    if request.turn_kind is not TurnKind.PERSON:
        text = f"{request.turn_kind}, priority {request.priority.name.lower()}"
        lines.append((TextCell("    turn                      ", CellStyle.FAINT), TextCell(text)))
    lines.append(())
    if request.drops_kv:
        text = "Its KV was dropped at its end (cache: drop); its slot is as before."
        lines.append((TextCell(text),))
    if request.miss:
        lines += miss_lines(request.miss)
    else:
        lines.append(_full_reuse(request))
    return tuple(lines)


def response_headers(request: RequestView) -> tuple[Line, ...]:
    """Response headers of a finished request."""
    headers = {
        "cache-hit": "true" if request.n_cached else "false",
        "cache-prefix-tokens": str(request.n_cached),
        "cache-new-tokens": str(request.n_prompt - request.n_cached),
        "ttft-saved-ms": f"{request.saved_s * 1000:.0f}",
    }
    if request.n_images:
        headers["images"] = images(request.n_images, request.n_images_computed)
    if request.loops:
        headers["loops"] = "; ".join(map(str, request.loops))
    if request.repeated_call:
        headers["repeated-call"] = str(request.repeated_call)
    if request.slot is not None:
        headers["slot"] = str(request.slot)
    if request.agent:
        headers["agent"] = request.agent
    if request.turn_kind is not TurnKind.PERSON:
        headers["turn"] = f"{request.turn_kind}, priority {request.priority.name.lower()}"
    if request.drops_kv:
        headers["cache"] = "drop"
    if request.miss:
        headers |= _miss_headers(request.miss)
    return tuple(
        (TextCell(f"  {HEADER}{name}: ", CellStyle.FAINT), TextCell(printable(value, 70)))
        for name, value in headers.items()
    )


def _miss_headers(miss: MissView) -> dict[str, str]:
    reason = miss.reason
    if miss.at is not None:
        reason += f" at token {miss.at}"
    return {
        "cache-miss-reason": reason,
        "cache-lost-tokens": str(miss.n_lost),
        "cache-lost-ms": f"{miss.lost_s * 1000:.0f}",
    }


def miss_lines(miss: MissView) -> tuple[Line, ...]:
    """Reason and cost of a miss, and the text around the place."""
    summary = f"Computed again because: {printable(miss.reason, 80)}"
    if miss.at is not None:
        summary += f", at token {miss.at}"
    if miss.n_lost:
        summary += f"; {count(miss.n_lost)} tokens, {short_time(miss.lost_s)}"
    head: Line = (TextCell(summary, CellStyle.WARN),)
    if not (miss.text_shared or miss.text_cached or miss.text_sent):
        return (head,)
    return (
        head,
        _text_line("the same up to", TextCell(miss.text_shared)),
        _text_line("in the cache", TextCell(miss.text_cached, CellStyle.BAD)),
        _text_line("in the request", TextCell(miss.text_sent, CellStyle.GOOD)),
    )


def _text_line(name: str, cell: TextCell) -> Line:
    return TextCell(f"  {name:<16}", CellStyle.FAINT), TextCell(
        printable(cell.text, 300), cell.tone
    )


def _full_reuse(request: RequestView) -> Line:
    cached = count(request.n_cached)
    new = count(request.n_prompt - request.n_cached)
    text = f"Full reuse: {cached} tokens came from {request.source}, {new} were new."
    return (TextCell(text, CellStyle.GOOD),)
