"""Agents: their place, requests, reuse and turns."""

from collections import Counter

from mlxstack.core.formatting import NONE, age, count, printable, share, short_time, size, span
from mlxstack.core.status import AgentKVView, AgentView, MissView, TurnView
from mlxstack.host.coding_clients import first_command
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.overview import PRIORITIES, joined
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableData,
    TableRow,
    TextCell,
    columns_of,
    fitted,
    tabulated,
    title,
)

NOT_YET = "This service does not report its agents yet."
NAMES = {"live": "live", "parked": "parked", "disk": "on disk"}
PLACES = {"live": CellStyle.GOOD, "parked": CellStyle.PLAIN, "disk": CellStyle.FAINT}
REUSED = "▓"
COMPUTED = "█"
GENERATED = "░"


def agents(model: DashboardState, width: int) -> TableData:
    """All agents, live, parked or on disk."""
    found = model.frame.agents
    columns = (
        "agent *12~, where 8, tokens >7, requests >8, reused >6, saved >7, idle >6, "
        "priority 8@112, size >9@112, last miss *16@112"
    )
    rows = (TableRow(one.id, _agent(one, model)) for one in found or ())
    command = first_command(model.frame.service.n_ctx)
    note = NOT_YET if found is None else f"No agent yet. Start one: {command}"
    return tabulated(title("Agents", _census(model)), columns, rows, width, note)


def agent(model: DashboardState, name: str) -> AgentView | None:
    """Find an agent by its id."""
    return next((one for one in model.frame.agents or () if one.id == name), None)


def portrait(one: AgentView, title: str = "") -> tuple[Line, ...]:
    """Portrait of an agent above its turns, with its last miss."""
    n_computed = one.n_prompt - one.n_cached
    work = (
        f"{count(one.n_cached)} reused ({share(one.n_cached, one.n_prompt)}), "
        f"{count(n_computed)} computed, {count(one.n_generated)} out"
    )
    first = joined(
        [
            *([TextCell(printable(title, 60), CellStyle.STRONG)] if title else []),
            TextCell(printable(one.id, 60), CellStyle.FAINT if title else CellStyle.STRONG),
            _place(one),
            TextCell(one.priority.name.lower(), PRIORITIES[one.priority]),
            TextCell(f"{count(one.n_tokens)} tokens, {size(one.n_bytes)}"),
            *([TextCell("pinned", CellStyle.WARN)] if one.is_pinned else []),
        ]
    )
    saved = TextCell(f"{span(one.saved_s)} saved", CellStyle.GOOD)
    second = joined([TextCell(f"{one.n_requests} requests"), TextCell(work), saved])
    return (first, second, *((last_miss(one.miss),) if one.miss else ()))


def last_miss(miss: MissView) -> Line:
    """The last miss: reason, place, both texts."""
    at = "" if miss.at is None else f" at token {miss.at}"
    change = ""
    if miss.text_cached or miss.text_sent:
        change = f": {printable(miss.text_cached, 24)} -> {printable(miss.text_sent, 24)}"
    told = f"{printable(miss.reason, 40)}{at}, {span(miss.age_s)} ago{change}"
    return (TextCell("last miss ", CellStyle.FAINT), TextCell(told, CellStyle.WARN))


def states(one: AgentView, width: int) -> TableData:
    """KV of an agent per model."""
    columns = "model *16, tokens >7, size >9, where 8"
    rows = [TableRow(state.model, _state(state)) for state in one.states]
    return tabulated(title("States"), columns, rows, width, "No state is kept.")


def turns(one: AgentView, width: int) -> TableData:
    """Its latest turns as bars of tokens: reused, computed, generated."""
    columns = columns_of("age >6, ttft >7, reused >6, tokens >7, bar *20, why not more 12")
    shown = fitted(columns, width)
    largest = max((_n_tokens(turn) for turn in one.turns), default=0)
    rows = tuple(
        TableRow(str(i), _turn(turn, largest, shown[4].width)) for i, turn in enumerate(one.turns)
    )
    legend = f"{REUSED} reused  {COMPUTED} computed  {GENERATED} generated"
    return TableData(title("Turns", legend), shown, tuple(reversed(rows)), "No turn was recorded.")


def turn_bar(turn: TurnView, largest: int, width: int) -> str:
    """Three parts on one scale, each nonzero one visible."""
    parts = ((turn.n_cached, REUSED), (turn.n_computed, COMPUTED), (turn.n_generated, GENERATED))
    room = max(0, width - sum(n > 0 for n, _ in parts))
    scale = room / largest if largest else 0.0
    return "".join(sign * (1 + int(n * scale)) for n, sign in parts if n > 0)


def _state(state: AgentKVView) -> tuple[TextCell, ...]:
    return (
        TextCell(printable(state.model, 60)),
        TextCell(count(state.n_tokens)),
        TextCell(size(state.n_bytes)),
        TextCell(printable(state.place)),
    )


def _n_tokens(turn: TurnView) -> int:
    return turn.n_cached + turn.n_computed + turn.n_generated


def _turn(turn: TurnView, largest: int, width: int) -> tuple[TextCell, ...]:
    return (
        TextCell(age(turn.age_s)),
        TextCell(short_time(turn.ttft_s)),
        TextCell(share(turn.n_cached, turn.n_cached + turn.n_computed)),
        TextCell(count(_n_tokens(turn))),
        TextCell(turn_bar(turn, largest, width)),
        TextCell(printable(turn.reason or NONE, 40), CellStyle.FAINT),
    )


def _census(model: DashboardState) -> str:
    """Count the agents by place."""
    found = model.frame.agents
    if not found:
        return ""
    where = Counter("live" if one.slot is not None else one.place for one in found)
    told = ", ".join(f"{where[place]} {name}" for place, name in NAMES.items() if where[place])
    n_all = model.frame.n_agents
    some = f"the last {len(found)} of {n_all}" if n_all > len(found) else str(len(found))
    return f"{some}{': ' if told else ''}{told}  enter shows one"


def _agent(one: AgentView, model: DashboardState) -> tuple[TextCell, ...]:
    name = agent_name(model, one.id)
    return (
        TextCell(f"* {name}" if one.is_pinned else name),
        _place(one),
        TextCell(count(one.n_tokens)),
        TextCell(str(one.n_requests)),
        TextCell(share(one.n_cached, one.n_prompt)),
        TextCell(span(one.saved_s) if one.saved_s else NONE),
        TextCell(NONE if one.place == "live" and not one.idle_s else age(one.idle_s)),
        TextCell(one.priority.name.lower(), PRIORITIES[one.priority]),
        TextCell(size(one.n_bytes)),
        TextCell(printable(one.miss.reason if one.miss else NONE, 60), CellStyle.FAINT),
    )


def _place(one: AgentView) -> TextCell:
    if one.slot is not None:
        return TextCell(f"slot {one.slot}", CellStyle.GOOD)
    return TextCell(printable(one.place, 8) or NONE, PLACES.get(one.place, CellStyle.PLAIN))
