"""Who works here, and what did each of them cost and save?"""

from collections import Counter

from mlxstack.core.frame import AgentView, MissView, TurnView
from mlxstack.tui.model import Model
from mlxstack.tui.views.figures import (
    NONE,
    printable,
    share,
    short_time,
    size,
    span,
    starred,
    tokens,
)
from mlxstack.tui.views.overview import PRIORITIES, WIDE, joined
from mlxstack.tui.views.sheet import Cell, Column, Line, Row, Sheet, Tone, fitted, title

NOT_YET = "This service does not report its agents yet."
NAMES = {"live": "live", "parked": "parked", "disk": "on disk"}
PLACES = {"live": Tone.GOOD, "parked": Tone.PLAIN, "disk": Tone.FAINT}
REUSED, COMPUTED, GENERATED = "█", "▓", "░"


def agents(model: Model, width: int) -> Sheet:
    """Everybody, live, parked or on disk."""
    found = model.frame.agents
    is_wide = width >= WIDE
    columns = (
        Column("agent", 12, is_wide=True),
        Column("where", 8),
        Column("tokens", 7, is_right=True),
        Column("requests", 8, is_right=True),
        Column("reused", 6, is_right=True),
        Column("saved", 7, is_right=True),
        Column("idle", 6, is_right=True),
        *((Column("priority", 8), Column("size", 9, is_right=True)) if is_wide else ()),
        *((Column("last miss", 16, is_wide=True),) if is_wide else ()),
    )
    rows = tuple(Row(one.id, _agent(one, is_wide)) for one in found or ())
    note = NOT_YET if found is None else "No agent has come by yet."
    return Sheet(title("Agents", _census(model)), fitted(columns, width), rows, note)


def agent(model: Model, name: str) -> AgentView | None:
    """One of them."""
    return next((one for one in model.frame.agents or () if one.id == name), None)


def portrait(one: AgentView) -> tuple[Line, ...]:
    """What is to be said about one agent, above its turns, with its last miss."""
    n_computed = one.n_prompt - one.n_cached
    work = (
        f"{tokens(one.n_cached)} reused ({share(one.n_cached, one.n_prompt)}), "
        f"{tokens(n_computed)} computed, {tokens(one.n_generated)} out"
    )
    first = joined(
        [
            Cell(printable(one.id, 60), Tone.STRONG),
            _place(one),
            Cell(one.priority.name.lower(), PRIORITIES[one.priority]),
            Cell(f"{tokens(one.n_tokens)} tokens, {size(one.n_bytes)}"),
            *([Cell("pinned", Tone.WARN)] if one.is_pinned else []),
        ]
    )
    saved = Cell(f"{span(one.saved_s)} saved", Tone.GOOD)
    second = joined([Cell(f"{one.n_requests} requests"), Cell(work), saved])
    return (first, second, *((last_miss(one.miss),) if one.miss else ()))


def last_miss(miss: MissView) -> Line:
    """Why it last computed more than it had to, where, and what was there instead."""
    at = "" if miss.at is None else f" at token {miss.at}"
    change = ""
    if miss.text_cached or miss.text_sent:
        change = f": {printable(miss.text_cached, 24)} -> {printable(miss.text_sent, 24)}"
    told = f"{printable(miss.reason, 40)}{at}, {span(miss.age_s)} ago{change}"
    return (Cell("last miss ", Tone.FAINT), Cell(told, Tone.WARN))


def states(one: AgentView, width: int) -> Sheet:
    """What it has for each model."""
    columns = (
        Column("model", 16, is_wide=True),
        Column("tokens", 7, is_right=True),
        Column("size", 9, is_right=True),
        Column("where", 8),
    )
    rows = tuple(
        Row(
            state.model,
            (
                Cell(printable(state.model, 60)),
                Cell(tokens(state.n_tokens)),
                Cell(size(state.n_bytes)),
                Cell(printable(state.place)),
            ),
        )
        for state in one.states
    )
    return Sheet(title("States"), fitted(columns, width), rows, "No state is kept.")


def turns(one: AgentView, width: int) -> Sheet:
    """Its latest turns as bars of tokens: reused, computed, generated."""
    columns = (
        Column("age", 6, is_right=True),
        Column("ttft", 7, is_right=True),
        Column("reused", 6, is_right=True),
        Column("tokens", 7, is_right=True),
        Column("bar", 20, is_wide=True),
        Column("why not more", 12),
    )
    shown = fitted(columns, width)
    largest = max((_n_tokens(turn) for turn in one.turns), default=0)
    rows = tuple(
        Row(str(i), _turn(turn, largest, shown[4].width)) for i, turn in enumerate(one.turns)
    )
    legend = f"{REUSED} reused  {COMPUTED} computed  {GENERATED} generated"
    return Sheet(title("Turns", legend), shown, tuple(reversed(rows)), "No turn was recorded.")


def turn_bar(turn: TurnView, largest: int, width: int) -> str:
    """Three stretches on one scale; what happened at all is at least one cell long."""
    parts = ((turn.n_cached, REUSED), (turn.n_computed, COMPUTED), (turn.n_generated, GENERATED))
    room = max(0, width - sum(n > 0 for n, _ in parts))
    scale = room / largest if largest else 0.0
    return "".join(sign * (1 + int(n * scale)) for n, sign in parts if n > 0)


def _n_tokens(turn: TurnView) -> int:
    return turn.n_cached + turn.n_computed + turn.n_generated


def _turn(turn: TurnView, largest: int, width: int) -> tuple[Cell, ...]:
    return (
        Cell(span(turn.age_s)),
        Cell(short_time(turn.ttft_s)),
        Cell(share(turn.n_cached, turn.n_cached + turn.n_computed)),
        Cell(tokens(_n_tokens(turn))),
        Cell(turn_bar(turn, largest, width)),
        Cell(printable(turn.reason or NONE, 40), Tone.FAINT),
    )


def _census(model: Model) -> str:
    """How many there are, and where."""
    found = model.frame.agents
    if not found:
        return ""
    where = Counter("live" if one.slot is not None else one.place for one in found)
    told = ", ".join(f"{where[place]} {name}" for place, name in NAMES.items() if where[place])
    n_all = model.frame.n_agents
    some = f"the last {len(found)} of {n_all}" if n_all > len(found) else str(len(found))
    return f"{some}{': ' if told else ''}{told}  enter shows one"


def _agent(one: AgentView, is_wide: bool) -> tuple[Cell, ...]:
    cells = (
        Cell(starred(one.id, is_pinned=one.is_pinned)),
        _place(one),
        Cell(tokens(one.n_tokens)),
        Cell(str(one.n_requests)),
        Cell(share(one.n_cached, one.n_prompt)),
        Cell(span(one.saved_s) if one.saved_s else NONE),
        Cell(NONE if one.place == "live" and not one.idle_s else span(one.idle_s)),
    )
    if not is_wide:
        return cells
    return (
        *cells,
        Cell(one.priority.name.lower(), PRIORITIES[one.priority]),
        Cell(size(one.n_bytes)),
        Cell(printable(one.miss.reason if one.miss else NONE, 60), Tone.FAINT),
    )


def _place(one: AgentView) -> Cell:
    if one.slot is not None:
        return Cell(f"slot {one.slot}", Tone.GOOD)
    return Cell(printable(one.place, 8) or NONE, PLACES.get(one.place, Tone.PLAIN))
