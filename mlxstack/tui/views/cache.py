"""What is remembered, what did it save, and why was something computed again?"""

from mlxstack.core.formatting import printable, size
from mlxstack.core.status import CacheView, MissView, PrefixView, WindowSums
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import NONE, bar, of_size, share, span, starred, tokens
from mlxstack.tui.views.overview import WIDE, joined
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableColumn,
    TableData,
    TableRow,
    TextCell,
    fitted,
    title,
)

NOT_YET = "This service does not report its prefix cache yet."
UNNAMED = "(no name)"
OFF = "The prefix cache is off; prefix_cache.enabled in the preset turns it on."


def budget(model: DashboardState, width: int) -> tuple[Line, ...]:
    """How much is kept in memory and on disk, of how much."""
    cache = model.frame.cache
    if cache is None or not cache.is_enabled:
        return ()
    n_bar = 24 if width >= WIDE else 14
    memory = _filled("memory", cache.memory_bytes, cache.memory_budget, n_bar)
    disk = _filled("disk  ", cache.disk_bytes, cache.disk_budget, n_bar)
    bound = f" of {cache.max_entries}" if cache.max_entries else ""
    entries = TextCell(f"{cache.n_entries}{bound} entries")
    evicted = TextCell(
        f"{cache.n_evicted} evicted", CellStyle.WARN if cache.n_evicted else CellStyle.FAINT
    )
    return joined([*memory, entries]), joined([*disk, evicted])


def rates(model: DashboardState, width: int) -> TableData:
    """Hit rates by requests and by tokens, and the time that was saved."""
    cache = model.frame.cache
    columns = (
        TableColumn("window", 12),
        TableColumn("requests", 9, is_right=True),
        TableColumn("hits", 6, is_right=True),
        TableColumn("prompt", 8, is_right=True),
        TableColumn("reused", 8, is_right=True),
        TableColumn("of tokens", 9, is_right=True),
        TableColumn("time saved", 10, is_right=True),
    )
    rows: tuple[TableRow, ...] = ()
    if cache is not None and cache.is_enabled:
        windows = (("last minute", cache.minute), ("last hour", cache.hour), ("all", cache.whole))
        rows = tuple(TableRow(name, _sums(name, sums)) for name, sums in windows)
    return TableData(title("Hit rates"), fitted(columns, width), rows, _why_not(cache) or NOT_YET)


def prefixes(model: DashboardState, width: int) -> TableData:
    """The prefixes that are worth most."""
    cache = model.frame.cache
    columns = (
        TableColumn("prefix", 14, is_wide=True),
        TableColumn("hits", 6, is_right=True),
        TableColumn("tokens", 7, is_right=True),
        TableColumn("size", 8, is_right=True),
        TableColumn("age", 6, is_right=True),
        TableColumn("shared by", 15, is_wide=True),
        *((TableColumn("kept in", 12),) if width >= WIDE else ()),
    )
    rows = tuple(TableRow(one.id, _prefix(one, width)) for one in cache.prefixes) if cache else ()
    note = _why_not(cache) or "Nothing is kept yet."
    return TableData(title("Top prefixes"), fitted(columns, width), rows, note)


def misses(model: DashboardState, width: int) -> TableData:
    """The latest requests that computed more than they had to."""
    cache = model.frame.cache
    columns = (
        TableColumn("age", 6, is_right=True),
        TableColumn("agent", 12),
        TableColumn("reason", 16),
        TableColumn("at token", 8, is_right=True),
        TableColumn("cached -> sent", 20, is_wide=True),
    )
    rows = tuple(TableRow(one.request, _miss(one)) for one in cache.misses) if cache else ()
    note = _why_not(cache) or "No request missed anything yet."
    return TableData(title("Misses", "enter explains"), fitted(columns, width), rows, note)


def miss(model: DashboardState, request: str) -> MissView | None:
    """The one of this request."""
    cache = model.frame.cache
    return next((one for one in cache.misses if one.request == request), None) if cache else None


def _why_not(cache: CacheView | None) -> str:
    if cache is None:
        return NOT_YET
    return "" if cache.is_enabled else OFF


def _filled(name: str, n_bytes: int, bound: int | None, n_bar: int) -> list[TextCell]:
    if bound is None:
        return [TextCell(f"{name} {size(n_bytes)}, no bound")]
    tone = CellStyle.WARN if n_bytes > 0.85 * bound else CellStyle.PLAIN
    return [TextCell(f"{name} {bar(n_bytes, bound, n_bar)} {of_size(n_bytes, bound)}", tone)]


def _sums(name: str, sums: WindowSums) -> tuple[TextCell, ...]:
    return (
        TextCell(name),
        TextCell(tokens(sums.n_requests)),
        TextCell(
            share(sums.n_hits, sums.n_requests), CellStyle.GOOD if sums.n_hits else CellStyle.FAINT
        ),
        TextCell(tokens(sums.n_prompt)),
        TextCell(tokens(sums.n_cached)),
        TextCell(
            share(sums.n_cached, sums.n_prompt),
            CellStyle.GOOD if sums.n_cached else CellStyle.FAINT,
        ),
        TextCell(span(sums.saved_s) if sums.saved_s else NONE),
    )


def _prefix(one: PrefixView, width: int) -> tuple[TextCell, ...]:
    cells = (
        TextCell(starred(one.name or UNNAMED, is_pinned=one.is_pinned)),
        TextCell(str(one.n_hits)),
        TextCell(tokens(one.n_tokens)),
        TextCell(size(one.n_bytes)),
        TextCell(span(one.age_s)),
        TextCell(printable(", ".join(one.agents), 80) or NONE),
    )
    return (*cells, TextCell(", ".join(one.places) or NONE)) if width >= WIDE else cells


def _miss(one: MissView) -> tuple[TextCell, ...]:
    change = f"{one.text_cached} -> {one.text_sent}" if one.text_cached or one.text_sent else NONE
    return (
        TextCell(span(one.age_s)),
        TextCell(printable(one.agent or NONE, 40)),
        TextCell(printable(one.reason, 40), CellStyle.WARN),
        TextCell(NONE if one.at is None else tokens(one.at)),
        TextCell(printable(change, 120), CellStyle.FAINT),
    )
