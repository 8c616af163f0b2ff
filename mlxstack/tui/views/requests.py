"""Finished requests: their times, headers and misses."""

from mlxstack.core.formatting import NONE, age, count, printable, short_time
from mlxstack.core.status import MissView, RequestView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import phases
from mlxstack.tui.views.formatting import images
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableData,
    TableRow,
    TextCell,
    share_cell,
    tabulated,
    title,
)

NOT_YET = "This service does not report its finished requests yet."
BAD = frozenset({"failed", "refused"})
HEADER = "x-mlx-stack-"
WIDE = 112
N_BAR = 18
N_WIDE_BAR = 64


def requests(model: DashboardState, width: int) -> TableData:
    """The last finished requests, the latest first."""
    found = model.frame.requests
    columns = (
        f"age >6, agent *14~, prompt >6, reused >6, out >5, ttft >6, phases {N_BAR}, "
        "queue >6@144, prefill >7@144, decode >6@144, images 14?@126, saved >7@112, slot >4@112, "
        "from 6@112, ended 9@112"
    )
    longest_s = max(map(phases.total_s, found or ()), default=0.0)
    rows = [TableRow(one.id, _request(one, model, longest_s)) for one in found or ()]
    note = NOT_YET if found is None else "No request has finished yet."
    told = f"the last {len(rows)}, enter tells why" if width >= WIDE else "enter: why"
    head = title("Requests", f"{told}  {phases.LEGEND}" if rows else "")
    return tabulated(head, columns, rows, width, note)


def request(model: DashboardState, name: str) -> RequestView | None:
    """Find a request by its id."""
    return next((one for one in model.frame.requests or () if one.id == name), None)


def why(one: RequestView) -> tuple[Line, ...]:
    """Details of one request: times and miss."""
    n_new = one.n_prompt - one.n_cached
    facts = [("saved by reuse", f"{short_time(one.saved_s):>6}")]
    if one.n_images:
        facts.append(("images", images(one.n_images, one.n_images_computed)))
    return (
        (
            TextCell(printable(one.id, 70), CellStyle.STRONG),
            TextCell(f"  ended: {printable(one.ended)}"),
        ),
        (TextCell("  "), *phases.bar(one, N_WIDE_BAR)),
        *phases.rows(one),
        *((TextCell(f"    {name:<26}", CellStyle.FAINT), TextCell(told)) for name, told in facts),
        (),
        *(miss_lines(one.miss) if one.miss else (_all_reused(one, n_new),)),
    )


def response_headers(one: RequestView) -> tuple[Line, ...]:
    """Response headers of a finished request."""
    headers = {
        "cache-hit": "true" if one.n_cached else "false",
        "cache-prefix-tokens": str(one.n_cached),
        "cache-new-tokens": str(one.n_prompt - one.n_cached),
        "ttft-saved-ms": f"{one.saved_s * 1000:.0f}",
        **({"images": images(one.n_images, one.n_images_computed)} if one.n_images else {}),
        **({"slot": str(one.slot)} if one.slot is not None else {}),
        **({"agent": one.agent} if one.agent else {}),
        **(_miss_headers(one.miss) if one.miss else {}),
    }
    return tuple(
        (TextCell(f"  {HEADER}{k}: ", CellStyle.FAINT), TextCell(printable(v, 70)))
        for k, v in headers.items()
    )


def _miss_headers(miss: MissView) -> dict[str, str]:
    at = "" if miss.at is None else f" at token {miss.at}"
    return {
        "cache-miss-reason": f"{miss.reason}{at}",
        "cache-lost-tokens": str(miss.n_lost),
        "cache-lost-ms": f"{miss.lost_s * 1000:.0f}",
    }


def miss_lines(miss: MissView) -> tuple[Line, ...]:
    """Reason and cost of a miss, and the text around the place."""
    at = "" if miss.at is None else f", at token {miss.at}"
    cost = f"; {count(miss.n_lost)} tokens, {short_time(miss.lost_s)}" if miss.n_lost else ""
    told = f"Computed again because: {printable(miss.reason, 80)}{at}{cost}"
    head: Line = (TextCell(told, CellStyle.WARN),)
    if not (miss.text_shared or miss.text_cached or miss.text_sent):
        return (head,)
    texts = (
        ("the same up to", miss.text_shared, CellStyle.PLAIN),
        ("in the cache", miss.text_cached, CellStyle.BAD),
        ("in the request", miss.text_sent, CellStyle.GOOD),
    )
    shown = [
        (TextCell(f"  {k:<16}", CellStyle.FAINT), TextCell(printable(v, 300), tone))
        for k, v, tone in texts
    ]
    return (head, *shown)


def _all_reused(one: RequestView, n_new: int) -> Line:
    cached = count(one.n_cached)
    new = count(n_new)
    told = f"Nothing was missed: {cached} tokens came from {one.source}, {new} were new."
    return (TextCell(told, CellStyle.GOOD),)


def _request(one: RequestView, model: DashboardState, longest_s: float) -> tuple[TextCell, ...]:
    tone = CellStyle.BAD if one.ended in BAD else CellStyle.PLAIN
    return (
        TextCell(age(one.age_s)),
        TextCell(agent_name(model, one.agent), tone),
        TextCell(count(one.n_prompt)),
        share_cell(one.n_cached, one.n_prompt),
        TextCell(count(one.n_generated)),
        TextCell(short_time(one.ttft_s)),
        TextCell("".join(cell.text for cell in phases.bar(one, N_BAR, longest_s))),
        TextCell(short_time(one.queued_s)),
        TextCell(short_time(one.prefill_s)),
        TextCell(short_time(one.decode_s)),
        TextCell(images(one.n_images, one.n_images_computed)),
        TextCell(short_time(one.saved_s) if one.saved_s else NONE),
        TextCell(NONE if one.slot is None else str(one.slot)),
        TextCell(one.source.value),
        TextCell(printable(one.ended, 12), tone),
    )
