"""The prefix cache: budget, hit rates, prefixes, misses."""

from mlxstack.core.formatting import NONE, age, count, printable, short_time, size, span
from mlxstack.core.status import CacheView, MissView, PrefixView, WindowSums
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import bar, of_size
from mlxstack.tui.views.names import agent_name, prefix_name
from mlxstack.tui.views.overview import WIDE, joined
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableData,
    TableRow,
    TextCell,
    columns_of,
    fitted,
    share_cell,
    tabulated,
    title,
)

NOT_YET = "This service does not report its prefix cache yet."
ARROW = " -> "
OFF = "The prefix cache is off; prefix_cache.enabled in the preset turns it on."


def budget(model: DashboardState, width: int) -> tuple[Line, ...]:
    """Fill of memory and disk against their budgets."""
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
    parked = model.frame.memory.parked_bytes if model.frame.memory else 0
    freed = [TextCell(f"X frees up to {size(parked)}")] if parked else []
    return joined([*memory, entries, *freed]), joined([*disk, evicted])


def rates(model: DashboardState, width: int) -> TableData:
    """Hit rates by requests and tokens, and time saved."""
    cache = model.frame.cache
    columns = "window 12, requests >9, hits >6, prompt >8, reused >8, of tokens >9, time saved >10"
    rows: list[TableRow] = []
    if cache is not None and cache.is_enabled:
        windows = (("last minute", cache.minute), ("last hour", cache.hour), ("all", cache.whole))
        rows = [TableRow(name, _sums(name, sums)) for name, sums in windows]
    return tabulated(title("Hit rates"), columns, rows, width, _why_not(cache) or NOT_YET)


def prefixes(model: DashboardState, width: int) -> TableData:
    """The prefixes that are worth most."""
    cache = model.frame.cache
    columns = "prefix *14, hits >6, tokens >7, size >8, age >6, shared by *15~, kept in 12@112"
    rows = (TableRow(one.id, _prefix(one, model)) for one in (cache.prefixes if cache else ()))
    note = _why_not(cache) or "Nothing is kept yet."
    return tabulated(title("Top prefixes"), columns, rows, width, note)


def misses(model: DashboardState, width: int) -> TableData:
    """Misses of the latest requests, the largest loss first."""
    cache = model.frame.cache
    columns = "lost >6, tokens >6, agent *12~, reason 16, cached -> sent *18, age >6"
    found = sorted(cache.misses, key=lambda one: (-one.lost_s, one.age_s)) if cache else ()
    n_change = fitted(columns_of(columns), width)[4].width
    rows = (TableRow(one.request, _miss(one, model, n_change)) for one in found)
    note = _why_not(cache) or "No request missed anything yet."
    return tabulated(title("Misses", "enter explains"), columns, rows, width, note)


def miss(model: DashboardState, request: str) -> MissView | None:
    """The one of this request."""
    cache = model.frame.cache
    if cache:
        return next((one for one in cache.misses if one.request == request), None)
    return None


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
        TextCell(count(sums.n_requests)),
        share_cell(sums.n_hits, sums.n_requests),
        TextCell(count(sums.n_prompt)),
        TextCell(count(sums.n_cached)),
        share_cell(sums.n_cached, sums.n_prompt),
        TextCell(span(sums.saved_s) if sums.saved_s else NONE),
    )


def _prefix(one: PrefixView, model: DashboardState) -> tuple[TextCell, ...]:
    name = prefix_name(model, one)
    users = ", ".join(agent_name(model, agent) for agent in one.agents)
    return (
        TextCell(f"* {name}" if one.is_pinned else name),
        TextCell(str(one.n_hits)),
        TextCell(count(one.n_tokens)),
        TextCell(size(one.n_bytes)),
        TextCell(age(one.age_s)),
        TextCell(users or NONE),
        TextCell(", ".join(one.places) or NONE),
    )


def _miss(one: MissView, model: DashboardState, n_change: int) -> tuple[TextCell, ...]:
    change = _change(one, n_change) if one.n_lost else NONE
    return (
        TextCell(short_time(one.lost_s) if one.lost_s else NONE, CellStyle.WARN),
        TextCell(count(one.n_lost) if one.n_lost else NONE),
        TextCell(agent_name(model, one.agent)),
        TextCell(printable(one.reason, 40), CellStyle.WARN if one.n_lost else CellStyle.PLAIN),
        TextCell(change, CellStyle.FAINT),
        TextCell(age(one.age_s), CellStyle.FAINT),
    )


def _change(one: MissView, width: int) -> str:
    """Both texts of a prompt that changed, cut alike."""
    if not (one.text_cached or one.text_sent):
        return NONE
    n_side = max(1, (width - len(ARROW)) // 2)
    return printable(one.text_cached, n_side) + ARROW + printable(one.text_sent, n_side)
