"""Names of agents and prefixes as people know them."""

from collections import Counter

from mlxstack.core.formatting import printable
from mlxstack.core.status import PrefixView
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import NONE

MOST_CHARS = 60
UNNAMED = "(no name)"


def agent_name(model: DashboardState, agent: str | None) -> str:
    """Agent by client and folder, numbered if equal, else its id."""
    if agent is None:
        return NONE
    titles = model.frame.titles
    title = titles.get(agent)
    if title is None:
        return printable(agent, MOST_CHARS)
    if Counter(titles.values())[title] == 1:
        return printable(title, MOST_CHARS)
    namesakes = sorted(name for name, other in titles.items() if other == title)
    return printable(f"{title} {namesakes.index(agent) + 1}", MOST_CHARS)


def prefix_name(model: DashboardState, prefix: PrefixView) -> str:
    """Name of a pinned prefix, else first words and last user."""
    if prefix.name:
        return printable(prefix.name, MOST_CHARS)
    owner = agent_name(model, prefix.agents[0]) if prefix.agents else ""
    if prefix.opening:
        return f"{printable(prefix.opening, MOST_CHARS)}{f' ({owner})' if owner else ''}"
    return f"prefix of {owner}" if owner else UNNAMED
