"""Labels of agents and prefixes: client and folder, or first words."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlxstack.core.formatting import NONE, clipped, printable

if TYPE_CHECKING:
    from mlxstack.core.status import PrefixView

MAX_CHARS = 60
LEARNED = "learned-"
"""Beginning of the names that a service gives to prefixes itself."""
UNNAMED = "(no name)"


def agent_label(agent: str, titles: Mapping[str, str]) -> str:
    """Title of an agent, numbered among equal ones; else its id."""
    title = titles.get(agent)
    if not title:
        return printable(agent, MAX_CHARS)
    if Counter(titles.values())[title] == 1:
        return printable(title, MAX_CHARS)
    namesakes = sorted(name for name, own_title in titles.items() if own_title == title)
    return clipped(printable(f"{title} {namesakes.index(agent) + 1}"), MAX_CHARS)


def agent_name(agent: str | None, titles: Mapping[str, str]) -> str:
    """Label of an agent, a dash without one."""
    return NONE if agent is None else agent_label(agent, titles)


def prefix_label(prefix: "PrefixView", titles: Mapping[str, str]) -> str:
    """Name of a pinned prefix, else first words and last user."""
    is_given = prefix.is_pinned or not prefix.name.startswith(LEARNED)
    if prefix.name and is_given:
        return printable(prefix.name, MAX_CHARS)
    owner = agent_label(prefix.agents[0], titles) if prefix.agents else ""
    if prefix.opening:
        return f"{printable(prefix.opening, MAX_CHARS)}{f' ({owner})' if owner else ''}"
    if owner:
        return f"prefix of {owner}"
    return printable(prefix.name, MAX_CHARS) or UNNAMED
