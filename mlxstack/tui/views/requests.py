"""Where did the time of the last requests go?"""

from mlxstack.core.frame import MissView, RequestView
from mlxstack.tui.model import Model
from mlxstack.tui.views.figures import NONE, printable, share, short_time, span, tokens
from mlxstack.tui.views.overview import WIDE
from mlxstack.tui.views.sheet import Cell, Column, Line, Row, Sheet, Tone, fitted, title

NOT_YET = "This service does not report its finished requests yet."
BAD = frozenset({"failed", "refused"})
HEADER = "x-mlx-stack-"


def requests(model: Model, width: int) -> Sheet:
    """The last ones, the latest first."""
    found = model.frame.requests
    is_wide = width >= WIDE
    columns = (
        Column("age", 6, is_right=True),
        Column("agent", 8, is_wide=True),
        Column("prompt", 6, is_right=True),
        Column("reused", 6, is_right=True),
        Column("out", 5, is_right=True),
        Column("queue", 6, is_right=True),
        Column("prefill", 7, is_right=True),
        Column("decode", 6, is_right=True),
        Column("ttft", 6, is_right=True),
        *(
            (
                Column("saved", 7, is_right=True),
                Column("slot", 4, is_right=True),
                Column("from", 6),
                Column("ended", 9),
            )
            if is_wide
            else ()
        ),
    )
    rows = tuple(Row(one.id, _request(one, is_wide)) for one in found or ())
    note = NOT_YET if found is None else "No request has finished yet."
    head = title("Requests", f"the last {len(rows)}, enter tells why" if rows else "")
    return Sheet(head, fitted(columns, width), rows, note)


def request(model: Model, name: str) -> RequestView | None:
    """One of them."""
    return next((one for one in model.frame.requests or () if one.id == name), None)


def why(one: RequestView) -> tuple[Line, ...]:
    """Everything that is known of one request: its times, its headers, its miss."""
    n_new = one.n_prompt - one.n_cached
    headers = {
        "cache-hit": "true" if one.n_cached else "false",
        "cache-prefix-tokens": str(one.n_cached),
        "cache-new-tokens": str(n_new),
        "ttft-saved-ms": f"{one.saved_s * 1000:.0f}",
        **({"slot": str(one.slot)} if one.slot is not None else {}),
        **({"agent": one.agent} if one.agent else {}),
        **({"cache-miss-reason": one.miss.reason} if one.miss else {}),
    }
    times = (
        ("waited in the queue", one.queued_s),
        ("computed the prompt", one.prefill_s),
        ("generated", one.decode_s),
        ("first token after", one.ttft_s),
        ("saved by reuse", one.saved_s),
    )
    return (
        (Cell(printable(one.id, 70), Tone.STRONG), Cell(f"  ended: {printable(one.ended)}")),
        *((Cell(f"  {name:<20}", Tone.FAINT), Cell(short_time(s))) for name, s in times),
        (),
        *(
            (Cell(f"  {HEADER}{k}: ", Tone.FAINT), Cell(printable(v, 70)))
            for k, v in headers.items()
        ),
        (),
        *(miss_lines(one.miss) if one.miss else (_all_reused(one, n_new),)),
    )


def miss_lines(miss: MissView) -> tuple[Line, ...]:
    """Why something was computed again, and the text around the place."""
    at = "" if miss.at is None else f", at token {miss.at}"
    head: Line = (Cell(f"Computed again because: {printable(miss.reason, 80)}{at}", Tone.WARN),)
    if not (miss.text_shared or miss.text_cached or miss.text_sent):
        return (head,)
    texts = (
        ("the same up to", miss.text_shared, Tone.PLAIN),
        ("in the cache", miss.text_cached, Tone.BAD),
        ("in the request", miss.text_sent, Tone.GOOD),
    )
    told = [(Cell(f"  {k:<16}", Tone.FAINT), Cell(printable(v, 300), tone)) for k, v, tone in texts]
    return (head, *told)


def _all_reused(one: RequestView, n_new: int) -> Line:
    told = f"Nothing was missed: {one.n_cached} tokens came from {one.source}, {n_new} were new."
    return (Cell(told, Tone.GOOD),)


def _request(one: RequestView, is_wide: bool) -> tuple[Cell, ...]:
    tone = Tone.BAD if one.ended in BAD else Tone.PLAIN
    cells = (
        Cell(span(one.age_s)),
        Cell(printable(one.agent or NONE, 60), tone),
        Cell(tokens(one.n_prompt)),
        Cell(share(one.n_cached, one.n_prompt), Tone.GOOD if one.n_cached else Tone.FAINT),
        Cell(tokens(one.n_generated)),
        Cell(short_time(one.queued_s)),
        Cell(short_time(one.prefill_s)),
        Cell(short_time(one.decode_s)),
        Cell(short_time(one.ttft_s)),
    )
    if not is_wide:
        return cells
    return (
        *cells,
        Cell(short_time(one.saved_s) if one.saved_s else NONE),
        Cell(NONE if one.slot is None else str(one.slot)),
        Cell(one.source.value),
        Cell(printable(one.ended, 12), tone),
    )
