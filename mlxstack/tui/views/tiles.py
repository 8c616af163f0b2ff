"""Tiles of the first screen: memory, decode, prefill, reuse, queue."""

from msgspec import Struct

from mlxstack.core.engine_snapshot import RequestPhase, SlotView
from mlxstack.core.formatting import NONE, count, share, size, span
from mlxstack.core.status import MemoryView
from mlxstack.tui.state import DashboardState, decode_rate, prompt_rate
from mlxstack.tui.views.formatting import gib, rate, stacked
from mlxstack.tui.views.table_data import WIDE, CellStyle, Line, TextCell, warned

MEMORY_BAR = 30
NARROW_BAR = 12
LOW_SHARE = 0.1

Tile = tuple[Line, ...]


class MemoryPart(Struct, frozen=True):
    """Part of the memory bar, with a sign besides its color."""

    name: str
    sign: str
    n_bytes: int
    tone: CellStyle


def memory(model: DashboardState, width: int) -> Tile:
    """Memory left on the computer, and what takes the rest."""
    view = model.frame.memory
    if view is None:
        kv = size(model.frame.snapshot.kv_bytes)
        return (_line("Memory", width, TextCell(f"KV {kv}")),)
    left = f"{gib(view.available_bytes)} GiB left of {gib(view.total_bytes)}"
    is_low = view.available_bytes < LOW_SHARE * view.total_bytes or view.pressure != "calm"
    swap = "no swap"
    pressure = f"pressure {view.pressure}"
    if view.swap_bytes:
        swap = f"swap {size(view.swap_bytes)}"
        if width >= WIDE:
            # The tile has room for one line of 50 cells.
            pressure = view.pressure
    cells = (warned(left, is_low, CellStyle.GOOD), TextCell(f" · {pressure} · {swap}"))
    parts = memory_parts(view)
    if width < WIDE:
        return (_line("Memory", width, *_bar(parts, view, NARROW_BAR), TextCell(" "), *cells),)
    programs = TextCell(f" - others {gib(_others(parts, view))} GiB", CellStyle.FAINT)
    legend: list[TextCell] = []
    for part in parts:
        legend += [
            TextCell(f"{part.sign} ", part.tone),
            TextCell(f"{part.name} {gib(part.n_bytes)} ", CellStyle.FAINT),
        ]
    return ((*_bar(parts, view, MEMORY_BAR), programs), cells, tuple(legend))


def memory_parts(view: MemoryView) -> tuple[MemoryPart, ...]:
    """Shares of this service in bar order, then other processes."""
    return (
        MemoryPart("weights", "█", view.weights_bytes, CellStyle.BUSY),
        MemoryPart("live", "▓", view.live_bytes, CellStyle.GOOD),
        MemoryPart("parked", "▒", view.parked_bytes, CellStyle.REUSED),
        MemoryPart("work", "░", view.workspace_bytes, CellStyle.FAINT),
    )


def decode(model: DashboardState, width: int) -> Tile:
    """Generated tokens per second of all slots."""
    running = [v for v in model.frame.snapshot.slots if v.state is RequestPhase.RUNNING]
    speed = TextCell(f"{rate(decode_rate(model))} tok/s", CellStyle.STRONG)
    n_slots = len(model.frame.snapshot.slots)
    return _tile("Decode", width, (speed,), TextCell(f"{len(running)}/{n_slots} writing"))


def prefill(model: DashboardState, width: int) -> Tile:
    """Prefill rate, and the time until all prompts are done."""
    speed = TextCell(f"{rate(prompt_rate(model))} tok/s", CellStyle.STRONG)
    n_left = sum(n_to_compute(view) for view in model.frame.snapshot.slots)
    if not n_left:
        return _tile("Prefill", width, (speed,), TextCell("idle", CellStyle.FAINT))
    eta_s = eta(n_left, model)
    facts = [TextCell(f"{count(n_left)} left", CellStyle.BUSY)]
    if eta_s is not None:
        facts.append(TextCell(f"ETA {span(eta_s)}", CellStyle.BUSY))
    return _tile("Prefill", width, (speed,), *facts)


def reuse(model: DashboardState, width: int) -> Tile:
    """Reused share of prompt tokens, and the time it saved."""
    now = model.frame.snapshot.counters
    n_all = now.n_prompt_tokens + now.n_cached_tokens
    reused = TextCell(f"{share(now.n_cached_tokens, n_all)} reused", CellStyle.STRONG)
    cache = model.frame.cache
    saved = NONE
    if cache:
        saved = f"saved {span(cache.whole.saved_s)}"
    return _tile("Reuse", width, (reused,), TextCell(saved, CellStyle.REUSED))


def queue(model: DashboardState, width: int) -> Tile:
    """Waiting requests, and how long the oldest waits."""
    waiting = model.frame.snapshot.waiting
    limit = model.frame.service.max_waiting
    text = f"queue {len(waiting)}"
    if limit:
        text += f"/{limit}"
    length = TextCell(text, CellStyle.STRONG)
    if not waiting:
        return _tile("Queue", width, (length,), TextCell("no wait", CellStyle.FAINT))
    oldest_s = max(view.waited_s for view in waiting) + model.frame.snapshot_age_s
    return _tile("Queue", width, (length,), TextCell(f"oldest {span(oldest_s)}", CellStyle.WARN))


def n_to_compute(view: SlotView) -> int:
    """Prompt tokens left in a slot; 0 while its KV loads."""
    is_computing = view.state is RequestPhase.PREFILLING and not view.is_reading
    if is_computing:
        return max(0, view.n_prompt - view.n_done)
    return 0


def eta(n_tokens: int, model: DashboardState) -> float | None:
    """Seconds to prefill `n_tokens` at this speed; None if unknown."""
    speed = prompt_rate(model)
    if speed <= 0:
        return None
    return n_tokens / speed


def _tile(name: str, width: int, *lines: TextCell | Line) -> Tile:
    """Box with a line per fact, or one line where narrow."""
    facts = tuple(line if isinstance(line, tuple) else (line,) for line in lines)
    if width >= WIDE:
        return facts
    cells: list[TextCell] = []
    for fact in facts:
        if cells:
            cells.append(TextCell(" · ", CellStyle.FAINT))
        cells += fact
    return (_line(name, width, *cells),)


def _line(name: str, width: int, *cells: TextCell) -> Line:
    if width >= WIDE:
        return cells
    return (TextCell(f"{name:<8}", CellStyle.FAINT), *cells)


def _others(parts: tuple[MemoryPart, ...], view: MemoryView) -> int:
    ours = sum(part.n_bytes for part in parts)
    return max(0, view.total_bytes - view.available_bytes - ours)


def _bar(parts: tuple[MemoryPart, ...], view: MemoryView, width: int) -> list[TextCell]:
    """Memory bar: parts of this service, other processes, free memory."""
    sizes = [*(part.n_bytes for part in parts), _others(parts, view)]
    cells = stacked(sizes, view.total_bytes, width)
    drawn = [
        TextCell(part.sign * n, part.tone) for part, n in zip(parts, cells[:-1], strict=True) if n
    ]
    drawn.append(TextCell("-" * cells[-1], CellStyle.FAINT))
    drawn.append(TextCell("·" * (width - sum(cells)), CellStyle.FAINT))
    return drawn


TILES = (memory, decode, prefill, reuse, queue)
