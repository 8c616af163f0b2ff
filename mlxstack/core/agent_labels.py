"""Labels of agents: client and folder, or first words."""

from collections import Counter
from collections.abc import Mapping

from mlxstack.core.formatting import clipped, printable

MOST_CHARS = 60


def agent_label(agent: str, titles: Mapping[str, str]) -> str:
    """Title of an agent, numbered among equal ones; else its id."""
    title = titles.get(agent)
    if not title:
        return printable(agent, MOST_CHARS)
    if Counter(titles.values())[title] == 1:
        return printable(title, MOST_CHARS)
    namesakes = sorted(name for name, other in titles.items() if other == title)
    return clipped(printable(f"{title} {namesakes.index(agent) + 1}"), MOST_CHARS)
