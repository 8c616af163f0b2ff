"""What is remembered, what did it save, and why was something computed again?"""

from mlxstack.core.frame import CacheView, MissView, PrefixView, Sums
from mlxstack.tui.model import Model
from mlxstack.tui.views.figures import (
    NONE,
    bar,
    of_size,
    printable,
    share,
    size,
    span,
    starred,
    tokens,
)
from mlxstack.tui.views.overview import WIDE, joined
from mlxstack.tui.views.sheet import Cell, Column, Line, Row, Sheet, Tone, fitted, title

NOT_YET = "This service does not report its prefix cache yet."
UNNAMED = "(no name)"
OFF = "The prefix cache is off; prefix_cache.enabled in the preset turns it on."


def budget(model: Model, width: int) -> tuple[Line, ...]:
    """How much is kept in memory and on disk, of how much."""
    cache = model.frame.cache
    if cache is None or not cache.is_enabled:
        return ()
    n_bar = 24 if width >= WIDE else 14
    memory = _filled("memory", cache.memory_bytes, cache.memory_budget, n_bar)
    disk = _filled("disk  ", cache.disk_bytes, cache.disk_budget, n_bar)
    bound = f" of {cache.max_entries}" if cache.max_entries else ""
    entries = Cell(f"{cache.n_entries}{bound} entries")
    evicted = Cell(f"{cache.n_evicted} evicted", Tone.WARN if cache.n_evicted else Tone.FAINT)
    return joined([*memory, entries]), joined([*disk, evicted])


def rates(model: Model, width: int) -> Sheet:
    """Hit rates by requests and by tokens, and the time that was saved."""
    cache = model.frame.cache
    columns = (
        Column("window", 12),
        Column("requests", 9, is_right=True),
        Column("hits", 6, is_right=True),
        Column("prompt", 8, is_right=True),
        Column("reused", 8, is_right=True),
        Column("of tokens", 9, is_right=True),
        Column("time saved", 10, is_right=True),
    )
    rows: tuple[Row, ...] = ()
    if cache is not None and cache.is_enabled:
        windows = (("last minute", cache.minute), ("last hour", cache.hour), ("all", cache.whole))
        rows = tuple(Row(name, _sums(name, sums)) for name, sums in windows)
    return Sheet(title("Hit rates"), fitted(columns, width), rows, _why_not(cache) or NOT_YET)


def prefixes(model: Model, width: int) -> Sheet:
    """The prefixes that are worth most."""
    cache = model.frame.cache
    columns = (
        Column("prefix", 14, is_wide=True),
        Column("hits", 6, is_right=True),
        Column("tokens", 7, is_right=True),
        Column("size", 8, is_right=True),
        Column("age", 6, is_right=True),
        Column("shared by", 15, is_wide=True),
        *((Column("kept in", 12),) if width >= WIDE else ()),
    )
    rows = tuple(Row(one.id, _prefix(one, width)) for one in cache.prefixes) if cache else ()
    note = _why_not(cache) or "Nothing is kept yet."
    return Sheet(title("Top prefixes"), fitted(columns, width), rows, note)


def misses(model: Model, width: int) -> Sheet:
    """The latest requests that computed more than they had to."""
    cache = model.frame.cache
    columns = (
        Column("age", 6, is_right=True),
        Column("agent", 12),
        Column("reason", 16),
        Column("at token", 8, is_right=True),
        Column("cached -> sent", 20, is_wide=True),
    )
    rows = tuple(Row(one.ask, _miss(one)) for one in cache.misses) if cache else ()
    note = _why_not(cache) or "No request missed anything yet."
    return Sheet(title("Misses", "enter explains"), fitted(columns, width), rows, note)


def miss(model: Model, ask: str) -> MissView | None:
    """The one of this request."""
    cache = model.frame.cache
    return next((one for one in cache.misses if one.ask == ask), None) if cache else None


def _why_not(cache: CacheView | None) -> str:
    if cache is None:
        return NOT_YET
    return "" if cache.is_enabled else OFF


def _filled(name: str, n_bytes: int, bound: int | None, n_bar: int) -> list[Cell]:
    if bound is None:
        return [Cell(f"{name} {size(n_bytes)}, no bound")]
    tone = Tone.WARN if n_bytes > 0.85 * bound else Tone.PLAIN
    return [Cell(f"{name} {bar(n_bytes, bound, n_bar)} {of_size(n_bytes, bound)}", tone)]


def _sums(name: str, sums: Sums) -> tuple[Cell, ...]:
    return (
        Cell(name),
        Cell(tokens(sums.n_requests)),
        Cell(share(sums.n_hits, sums.n_requests), Tone.GOOD if sums.n_hits else Tone.FAINT),
        Cell(tokens(sums.n_prompt)),
        Cell(tokens(sums.n_cached)),
        Cell(share(sums.n_cached, sums.n_prompt), Tone.GOOD if sums.n_cached else Tone.FAINT),
        Cell(span(sums.saved_s) if sums.saved_s else NONE),
    )


def _prefix(one: PrefixView, width: int) -> tuple[Cell, ...]:
    cells = (
        Cell(starred(one.name or UNNAMED, is_pinned=one.is_pinned)),
        Cell(str(one.n_hits)),
        Cell(tokens(one.n_tokens)),
        Cell(size(one.n_bytes)),
        Cell(span(one.age_s)),
        Cell(printable(", ".join(one.agents), 80) or NONE),
    )
    return (*cells, Cell(", ".join(one.places) or NONE)) if width >= WIDE else cells


def _miss(one: MissView) -> tuple[Cell, ...]:
    change = f"{one.text_cached} -> {one.text_sent}" if one.text_cached or one.text_sent else NONE
    return (
        Cell(span(one.age_s)),
        Cell(printable(one.agent or NONE, 40)),
        Cell(printable(one.reason, 40), Tone.WARN),
        Cell(NONE if one.at is None else tokens(one.at)),
        Cell(printable(change, 120), Tone.FAINT),
    )
