"""Agents: their place, requests, reuse and turns."""

from collections import Counter

from mlxstack.core.formatting import NONE, age, count, printable, share, short_time, size, span
from mlxstack.core.status import AgentKVView, AgentView, MissView, TurnView
from mlxstack.host.coding_clients import first_command
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.overview import PRIORITIES, joined
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
)

NOT_YET = "This service does not report its agents yet."
NAMES = {"live": "live", "parked": "parked", "disk": "on disk"}
PLACES = {"live": CellStyle.GOOD, "parked": CellStyle.PLAIN, "disk": CellStyle.FAINT}
REUSED = "▓"
COMPUTED = "█"
GENERATED = "░"


def _name(agent: AgentView, context: DrawContext) -> TextCell:
    name = agent_name(context.model, agent.id)
    return starred(name, agent.is_pinned)


def _place(agent: AgentView) -> TextCell:
    if agent.slot is not None:
        return TextCell(f"slot {agent.slot}", CellStyle.GOOD)
    tone = PLACES.get(agent.place, CellStyle.PLAIN)
    return TextCell(printable(agent.place, 8) or NONE, tone)


def _idle_s(agent: AgentView) -> float | None:
    if agent.place == "live" and not agent.idle_s:
        return None
    return agent.idle_s


def _last_miss(agent: AgentView, _: DrawContext) -> TextCell:
    reason = NONE
    if agent.miss:
        reason = agent.miss.reason
    return TextCell(printable(reason, 60), CellStyle.FAINT)


def _n_tokens(turn: TurnView) -> int:
    return turn.n_cached + turn.n_computed + turn.n_generated


def turn_bar(turn: TurnView, largest: float, width: int) -> str:
    """Three parts on one scale, each nonzero one visible."""
    parts = ((turn.n_cached, REUSED), (turn.n_computed, COMPUTED), (turn.n_generated, GENERATED))
    n_free = max(0, width - sum(n > 0 for n, _ in parts))
    scale = n_free / max(1.0, largest)
    return "".join(sign * (1 + int(n * scale)) for n, sign in parts if n > 0)


AGENTS: tuple[Column[AgentView], ...] = (
    Column("agent", 12, _name, grows=True, is_cut_inside=True),
    Column("where", 8, lambda agent, _: _place(agent)),
    number("tokens", 7, lambda agent: agent.n_tokens),
    number("requests", 8, lambda agent: agent.n_requests, str),
    percentage("reused", 6, lambda agent: agent.n_cached, lambda agent: agent.n_prompt),
    number("saved", 7, lambda agent: agent.saved_s or None, span),
    number("idle", 6, _idle_s, age),
    Column(
        "priority",
        8,
        lambda agent, _: TextCell(agent.priority.name.lower(), PRIORITIES[agent.priority]),
        min_screen=WIDE,
    ),
    number("size", 9, lambda agent: agent.n_bytes, size, min_screen=WIDE),
    Column("last miss", 16, _last_miss, grows=True, min_screen=WIDE),
)

STATES: tuple[Column[AgentKVView], ...] = (
    Column("model", 16, lambda state, _: TextCell(printable(state.model, 60)), grows=True),
    number("tokens", 7, lambda state: state.n_tokens),
    number("size", 9, lambda state: state.n_bytes, size),
    Column("where", 8, lambda state, _: TextCell(printable(state.place))),
)

TURNS: tuple[Column[TurnView], ...] = (
    number("age", 6, lambda view: view.age_s, age),
    number("ttft", 7, lambda view: view.ttft_s, short_time),
    percentage(
        "reused", 6, lambda view: view.n_cached, lambda view: view.n_cached + view.n_computed
    ),
    number("tokens", 7, _n_tokens),
    Column(
        "bar",
        20,
        lambda view, context: TextCell(turn_bar(view, context.largest, context.width)),
        _n_tokens,
        grows=True,
    ),
    Column(
        "why not more",
        12,
        lambda view, _: TextCell(printable(view.reason or NONE, 40), CellStyle.FAINT),
    ),
)


def agents(model: DashboardState, width: int) -> TableData:
    """All agents, live, parked or on disk."""
    rows = [(agent.id, agent) for agent in model.frame.agents or ()]
    note = NOT_YET
    if model.frame.agents is not None:
        note = f"No agent yet. Start one: {first_command(model.frame.service.n_ctx)}"
    head = title("Agents", _census(model))
    return tabulated(head, AGENTS, rows, DrawContext(model, width), note)


def agent(model: DashboardState, name: str) -> AgentView | None:
    """Find an agent by its id."""
    return next((agent for agent in model.frame.agents or () if agent.id == name), None)


def portrait(agent: AgentView, title: str = "") -> tuple[Line, ...]:
    """Portrait of an agent above its turns, with its last miss."""
    n_computed = agent.n_prompt - agent.n_cached
    work = (
        f"{count(agent.n_cached)} reused ({share(agent.n_cached, agent.n_prompt)}), "
        f"{count(n_computed)} computed, {count(agent.n_generated)} out"
    )
    first = [TextCell(printable(agent.id, 60), CellStyle.STRONG)]
    if title:
        first = [
            TextCell(printable(title, 60), CellStyle.STRONG),
            TextCell(printable(agent.id, 60), CellStyle.FAINT),
        ]
    first += [
        _place(agent),
        TextCell(agent.priority.name.lower(), PRIORITIES[agent.priority]),
        TextCell(f"{count(agent.n_tokens)} tokens, {size(agent.n_bytes)}"),
    ]
    if agent.is_pinned:
        first.append(TextCell("pinned", CellStyle.WARN))
    saved = TextCell(f"{span(agent.saved_s)} saved", CellStyle.GOOD)
    second = [TextCell(f"{agent.n_requests} requests"), TextCell(work), saved]
    lines = [joined(first), joined(second)]
    if agent.miss:
        lines.append(last_miss(agent.miss))
    return tuple(lines)


def last_miss(miss: MissView) -> Line:
    """The last miss: reason, place, both texts."""
    text = printable(miss.reason, 40)
    if miss.at is not None:
        text += f" at token {miss.at}"
    text += f", {span(miss.age_s)} ago"
    if miss.text_cached or miss.text_sent:
        text += f": {printable(miss.text_cached, 24)} -> {printable(miss.text_sent, 24)}"
    return (TextCell("last miss ", CellStyle.FAINT), TextCell(text, CellStyle.WARN))


def states(agent: AgentView, model: DashboardState, width: int) -> TableData:
    """KV of an agent per model."""
    rows = [(state.model, state) for state in agent.states]
    return tabulated(title("States"), STATES, rows, DrawContext(model, width), "No state is kept.")


def turns(agent: AgentView, model: DashboardState, width: int) -> TableData:
    """Its latest turns as bars of tokens: reused, computed, generated."""
    rows = [(str(i), turn) for i, turn in enumerate(agent.turns)]
    legend = f"{REUSED} reused  {COMPUTED} computed  {GENERATED} generated"
    context = DrawContext(model, width, max(map(_n_tokens, agent.turns), default=0))
    return tabulated(
        title("Turns", legend), TURNS, reversed(rows), context, "No turn was recorded."
    )


def _census(model: DashboardState) -> str:
    agents = model.frame.agents
    if not agents:
        return ""
    counts = Counter("live" if agent.slot is not None else agent.place for agent in agents)
    places = ", ".join(f"{counts[place]} {name}" for place, name in NAMES.items() if counts[place])
    n_all = model.frame.n_agents
    summary = str(len(agents))
    if n_all > len(agents):
        summary = f"the last {len(agents)} of {n_all}"
    if places:
        summary += f": {places}"
    return f"{summary}  enter shows one"
