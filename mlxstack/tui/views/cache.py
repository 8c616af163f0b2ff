"""The prefix cache: budget, hit rates, prefixes, misses."""

from mlxstack.core.formatting import NONE, age, count, printable, short_time, size, span
from mlxstack.core.status import CacheView, DiskView, HeadView, MissView, PrefixView, WindowSums
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import bar, of_size
from mlxstack.tui.views.names import agent_name, prefix_name
from mlxstack.tui.views.overview import joined
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

NOT_YET = "This service does not report its prefix cache yet."
ARROW = " -> "
OFF = "The prefix cache is off; prefix_cache.enabled in the preset turns it on."


def _pinned_name(prefix: PrefixView, context: DrawContext) -> TextCell:
    name = prefix_name(context.model, prefix)
    return starred(name, prefix.is_pinned)


def _users(prefix: PrefixView, context: DrawContext) -> TextCell:
    names = [agent_name(context.model, agent) for agent in prefix.agents]
    return TextCell(", ".join(names) or NONE)


def _reason(miss: MissView, _: DrawContext) -> TextCell:
    return warned(printable(miss.reason, 40), bool(miss.n_lost))


def _change(miss: MissView, context: DrawContext) -> TextCell:
    """Both texts of a prompt that changed, cut alike."""
    text = NONE
    if miss.n_lost and (miss.text_cached or miss.text_sent):
        n_side = max(1, (context.width - len(ARROW)) // 2)
        text = printable(miss.text_cached, n_side) + ARROW + printable(miss.text_sent, n_side)
    return TextCell(text, CellStyle.FAINT)


Window = tuple[str, WindowSums]

RATES: tuple[Column[Window], ...] = (
    Column("window", 12, lambda window, _: TextCell(window[0])),
    number("requests", 9, lambda window: window[1].n_requests),
    percentage(
        "hits",
        6,
        lambda window: window[1].n_hits,
        lambda window: window[1].n_requests,
        tone=CellStyle.GOOD,
        zero_tone=CellStyle.FAINT,
    ),
    number("prompt", 8, lambda window: window[1].n_prompt),
    number("reused", 8, lambda window: window[1].n_cached),
    percentage(
        "of tokens",
        9,
        lambda window: window[1].n_cached,
        lambda window: window[1].n_prompt,
        tone=CellStyle.GOOD,
        zero_tone=CellStyle.FAINT,
    ),
    number("time saved", 10, lambda window: window[1].saved_s or None, span),
)

PREFIXES: tuple[Column[PrefixView], ...] = (
    Column("prefix", 14, _pinned_name, grows=True),
    number("hits", 6, lambda prefix: prefix.n_hits, str),
    number("tokens", 7, lambda prefix: prefix.n_tokens),
    number("size", 8, lambda prefix: prefix.n_bytes, size),
    number("age", 6, lambda prefix: prefix.age_s, age),
    Column("shared by", 15, _users, grows=True, is_cut_inside=True),
    Column(
        "kept in", 12, lambda prefix, _: TextCell(", ".join(prefix.places) or NONE), min_screen=WIDE
    ),
)

MISSES: tuple[Column[MissView], ...] = (
    number("lost", 6, lambda miss: miss.lost_s or None, short_time, tone=CellStyle.WARN),
    number("tokens", 6, lambda miss: miss.n_lost or None),
    Column(
        "agent",
        12,
        lambda miss, context: TextCell(agent_name(context.model, miss.agent)),
        grows=True,
        is_cut_inside=True,
    ),
    Column("reason", 16, _reason),
    Column("cached -> sent", 18, _change, grows=True),
    number("age", 6, lambda miss: miss.age_s, age, tone=CellStyle.FAINT),
)


def budget(model: DashboardState, width: int) -> tuple[Line, ...]:
    """Fill of memory and disk against their budgets."""
    cache = model.frame.cache
    if cache is None or not cache.is_enabled:
        return ()
    n_bar = 24 if width >= WIDE else 14
    memory = _filled("memory", cache.memory_bytes, cache.memory_budget, n_bar)
    disk = _filled("disk  ", cache.disk_bytes, cache.disk_budget, n_bar)
    n_entries = str(cache.n_entries)
    if cache.max_entries:
        n_entries += f" of {cache.max_entries}"
    memory.append(TextCell(f"{n_entries} entries"))
    if model.frame.memory and model.frame.memory.parked_bytes:
        memory.append(TextCell(f"X frees up to {size(model.frame.memory.parked_bytes)}"))
    disk.append(warned(f"{cache.n_evicted} evicted", cache.n_evicted > 0, CellStyle.FAINT))
    lines = [joined(memory), joined(disk)]
    if cache.disk is not None:
        lines += _writes(cache.disk)
    return (*lines, *map(_head, model.frame.client_heads))


def _writes(disk: DiskView) -> list[Line]:
    """Bytes of KV written today, and the effect of its limit."""
    text = f"written today {size(disk.today.kv_bytes)}"
    if disk.max_daily_bytes is not None:
        text += f" of {size(disk.max_daily_bytes)}"
    free = f"{size(disk.free_bytes)} of the volume free"
    lines: list[Line] = [joined([TextCell(text), TextCell(free, CellStyle.FAINT)])]
    if disk.trouble:
        lines.append((TextCell(disk.trouble, CellStyle.WARN),))
    return lines


def _head(head: HeadView) -> Line:
    """Line on the head of a client, computed before its first message."""
    name = " ".join(filter(None, (head.client, head.version, head.folder)))
    parts = [TextCell(f"head of {printable(name, 60)}"), TextCell(head.state)]
    if head.n_tokens:
        parts.append(TextCell(f"{count(head.n_tokens)} tokens"))
    if head.state == "ready":
        parts.append(TextCell(f"{count(head.n_cached)} were kept, {short_time(head.seconds)}"))
    return joined(parts)


def rates(model: DashboardState, width: int) -> TableData:
    """Hit rates by requests and tokens, and time saved."""
    cache = model.frame.cache
    rows: list[tuple[str, Window]] = []
    if cache is not None and cache.is_enabled:
        windows = (("last minute", cache.minute), ("last hour", cache.hour), ("all", cache.whole))
        rows = [(window[0], window) for window in windows]
    note = _why_not(cache) or NOT_YET
    return tabulated(title("Hit rates"), RATES, rows, DrawContext(model, width), note)


def prefixes(model: DashboardState, width: int) -> TableData:
    """The prefixes that are worth most."""
    cache = model.frame.cache
    prefixes = cache.prefixes if cache else ()
    rows = [(prefix.id, prefix) for prefix in prefixes]
    note = _why_not(cache) or "Nothing is kept yet."
    return tabulated(title("Top prefixes"), PREFIXES, rows, DrawContext(model, width), note)


def misses(model: DashboardState, width: int) -> TableData:
    """Misses of the latest requests, the largest loss first."""
    cache = model.frame.cache
    largest_first = sorted(
        cache.misses if cache else (), key=lambda miss: (-miss.lost_s, miss.age_s)
    )
    rows = [(miss.request, miss) for miss in largest_first]
    note = _why_not(cache) or "No request missed anything yet."
    head = title("Misses", "enter explains")
    return tabulated(head, MISSES, rows, DrawContext(model, width), note)


def miss(model: DashboardState, request: str) -> MissView | None:
    """The one of this request."""
    cache = model.frame.cache
    if cache:
        return next((miss for miss in cache.misses if miss.request == request), None)
    return None


def _why_not(cache: CacheView | None) -> str:
    if cache is None:
        return NOT_YET
    if not cache.is_enabled:
        return OFF
    return ""


def _filled(name: str, n_bytes: int, bound: int | None, n_bar: int) -> list[TextCell]:
    if bound is None:
        return [TextCell(f"{name} {size(n_bytes)}, no bound")]
    text = f"{name} {bar(n_bytes, bound, n_bar)} {of_size(n_bytes, bound)}"
    return [warned(text, n_bytes > 0.85 * bound)]
