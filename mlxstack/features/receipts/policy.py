"""Receipts: one line on what a turn reused, computed and waited for."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from rich.cells import cell_len, set_cell_size

from mlxstack.core.engine_events import KVSource
from mlxstack.core.formatting import count, printable, short_time
from mlxstack.core.status import MissView, RequestView

MAX_HELPER_TOKENS = 4000
"""Prompts of titles and the like are shorter, those of a client's turns longer."""

MIN_TEXT_CELLS = 8
"""Cells of a changed text below which it says nothing."""

SEPARATOR = ", "


class Cause(StrEnum):
    """Largest part of the seconds of a turn."""

    OTHERS = "waited for others"
    PROMPT = "computed the prompt"
    RESTORE = "read or copied KV"
    FIRST_TOKEN = "sampled the first token"
    ANSWER = "wrote the answer"
    NOTHING = "no time was measured"


class Receipt(Struct, frozen=True):
    """Receipt of one turn."""

    line: str
    """For people, at most as wide as was asked for."""
    request: str
    agent: str | None
    cause: Cause
    reason: str | None
    """That of the miss, as in `/requests`."""


def receipt_of(view: RequestView, width: int) -> Receipt:
    """Receipt in at most `width` cells."""
    reason = view.miss.reason if view.miss else None
    cause = cause_of(view)
    return Receipt(_line(view, cause, width), view.id, view.agent, cause, reason)


def main_turn(views: Sequence[RequestView]) -> RequestView | None:
    """Newest turn of a session; `views` begin with the newest request."""
    longest = max((view.n_prompt for view in views), default=0)
    shortest = min(longest // 2, MAX_HELPER_TOKENS)
    return next((view for view in views if view.n_prompt >= shortest), None)


def seconds_of(view: RequestView) -> dict[Cause, float]:
    """Seconds of a turn by their cause."""
    return {
        Cause.OTHERS: waited_s(view),
        Cause.PROMPT: view.prefill_s,
        Cause.RESTORE: view.restore_s,
        Cause.FIRST_TOKEN: view.first_s,
        Cause.ANSWER: view.decode_s,
    }


def cause_of(view: RequestView) -> Cause:
    """The largest part of a turn's seconds."""
    seconds = seconds_of(view)
    if not any(seconds.values()):
        return Cause.NOTHING
    return max(seconds, key=lambda cause: seconds[cause])


def waited_s(view: RequestView) -> float:
    """Seconds in the queue, and for prompts and answers of others."""
    return view.queued_s + view.others_s + view.beside_s


def _line(view: RequestView, cause: Cause, width: int) -> str:
    n_new = view.n_prompt - view.n_cached
    parts = [f"{count(view.n_cached)} reused, {count(n_new)} new", _first_token(view)]
    waited = f"waited {short_time(waited_s(view))} for others"
    dominant = _dominant(view, cause, waited)
    if dominant:
        parts.append(dominant)
    miss = view.miss
    if miss is not None and (miss.n_lost or cause is Cause.PROMPT):
        start = SEPARATOR.join(parts)
        return _cut(start + _loss(miss, width - cell_len(start)), width)
    line = SEPARATOR.join(parts)
    whole = f"{line}{SEPARATOR}{waited}"
    if dominant != waited and cell_len(whole) <= width:
        return whole
    return _cut(line, width)


def _first_token(view: RequestView) -> str:
    if view.ttft_s:
        return f"first token {short_time(view.ttft_s)}"
    return f"no token ({printable(view.ended)})"


def _dominant(view: RequestView, cause: Cause, waited: str) -> str:
    """Figure of a cause that the first token does not explain."""
    match cause:
        case Cause.OTHERS:
            return waited
        case Cause.ANSWER:
            return f"{count(view.n_generated)} tokens in {short_time(view.decode_s)}"
        case Cause.RESTORE:
            verb = "read" if view.source is KVSource.DISK else "copied"
            return f"KV {verb} in {short_time(view.restore_s)}"
    return ""


def _loss(miss: MissView, cells: int) -> str:
    """Reason of a miss, and the changed text where it fits."""
    loss = f": {printable(miss.reason)}"
    if not miss.n_lost:
        return loss
    marks = cell_len("`` -> ``, ")
    text_cells = (cells - cell_len(loss) - marks) // 2
    if miss.at is None or not miss.text_sent or text_cells < MIN_TEXT_CELLS:
        return f"{loss}, {count(miss.n_lost)} lost"
    before = _cut(printable(miss.text_cached), text_cells)
    after = _cut(printable(miss.text_sent), text_cells)
    return f"{loss}, `{before}` -> `{after}`"


def _cut(text: str, cells: int) -> str:
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    return set_cell_size(text, cells - 1).rstrip() + "…"
