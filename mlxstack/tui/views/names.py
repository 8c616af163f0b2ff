"""Names of agents and prefixes as people know them."""

from mlxstack.core.agent_labels import MOST_CHARS, agent_label
from mlxstack.core.formatting import NONE, printable
from mlxstack.core.status import PrefixView
from mlxstack.tui.state import DashboardState

UNNAMED = "(no name)"


def agent_name(model: DashboardState, agent: str | None) -> str:
    """Agent by client and folder, numbered if equal, else its id."""
    if agent is None:
        return NONE
    return agent_label(agent, model.frame.titles)


def prefix_name(model: DashboardState, prefix: PrefixView) -> str:
    """Name of a pinned prefix, else first words and last user."""
    if prefix.name:
        return printable(prefix.name, MOST_CHARS)
    owner = agent_name(model, prefix.agents[0]) if prefix.agents else ""
    if prefix.opening:
        return f"{printable(prefix.opening, MOST_CHARS)}{f' ({owner})' if owner else ''}"
    return f"prefix of {owner}" if owner else UNNAMED
