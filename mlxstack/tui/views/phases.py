"""Bar of the phases of a request: waits, prefill, answer."""

from msgspec import Struct

from mlxstack.core.engine_events import PHASE_NAMES, TTFTPhase
from mlxstack.core.formatting import short_time
from mlxstack.core.status import RequestView
from mlxstack.tui.views.formatting import stacked
from mlxstack.tui.views.table_data import CellStyle, Line, TextCell

MIN_S = 0.0005
"""Shorter phases are shown as 0ms, and left out."""


class PhasePart(Struct, frozen=True):
    """Part of a bar: name, sign besides its color, seconds."""

    name: str
    sign: str
    tone: CellStyle
    seconds: float


SIGNS = {
    TTFTPhase.QUEUED: TextCell("·", CellStyle.WARN),
    TTFTPhase.OTHER_PROMPTS: TextCell("-", CellStyle.WARN),
    TTFTPhase.RESTORE: TextCell("▓", CellStyle.REUSED),
    TTFTPhase.PREFILL: TextCell("█", CellStyle.BUSY),
    TTFTPhase.OTHER_ANSWERS: TextCell("-", CellStyle.WARN),
    TTFTPhase.FIRST_TOKEN: TextCell("░", CellStyle.GOOD),
}
LEGEND = "· queue - others ▓ KV █ prompt ░ answer"


def first_token_parts(request: RequestView) -> tuple[PhasePart, ...]:
    """Phases until the first token; their seconds add up to `ttft_s`."""
    return tuple(
        PhasePart(PHASE_NAMES[phase], sign.text, sign.tone, getattr(request, phase))
        for phase, sign in SIGNS.items()
    )


def parts(request: RequestView) -> tuple[PhasePart, ...]:
    """Phases until the last token."""
    answer_s = max(0.0, request.decode_s - request.first_s)
    return (*first_token_parts(request), PhasePart("the answer", "░", CellStyle.GOOD, answer_s))


def bar(request: RequestView, width: int, longest_s: float = 0.0) -> Line:
    """Phases as one bar; `longest_s` seconds, by default its own, fill it."""
    visible = [part for part in parts(request) if part.seconds >= MIN_S]
    whole_s = longest_s or sum(part.seconds for part in visible)
    cells = stacked([part.seconds for part in visible], whole_s, width)
    pairs = zip(visible, cells, strict=True)
    return tuple(TextCell(part.sign * n, part.tone) for part, n in pairs if n)


def total_s(request: RequestView) -> float:
    """Seconds of all phases."""
    return sum(part.seconds for part in parts(request))


def rows(request: RequestView) -> tuple[Line, ...]:
    """Phases until the first token, one a line, and their sum."""
    visible = [part for part in first_token_parts(request) if part.seconds >= MIN_S]
    lines = [_row(part.sign, part.tone, part.name, part.seconds) for part in visible]
    if request.ttft_s:
        lines.append(_row("=", CellStyle.STRONG, "first token after", request.ttft_s))
    if request.decode_s:
        lines.append(_row("░", CellStyle.GOOD, "generated", request.decode_s))
    return tuple(lines)


def _row(sign: str, tone: CellStyle, name: str, seconds: float) -> Line:
    text = TextCell(f"{name:<26}", CellStyle.FAINT)
    return (TextCell(f"  {sign} ", tone), text, TextCell(f"{short_time(seconds):>6}"))
