"""Names of agents and prefixes as people know them."""

from mlxstack.core import agent_labels
from mlxstack.core.status import PrefixView
from mlxstack.tui.state import DashboardState


def agent_name(model: DashboardState, agent: str | None) -> str:
    """Agent by client and folder, numbered if equal, else its id."""
    return agent_labels.agent_name(agent, model.frame.titles)


def prefix_name(model: DashboardState, prefix: PrefixView) -> str:
    """Name of a pinned prefix, else first words and last user."""
    return agent_labels.prefix_label(prefix, model.frame.titles)
