"""Agents by the names that people see: labels, beginnings, groups."""

from typing import Any

from mlxstack.cli.exit_codes import Misuse
from mlxstack.core.agent_labels import agent_label
from mlxstack.core.errors import NotFound

MAX_NAMED = 5

Found = dict[str, Any]


def labels_of(agents: list[Found]) -> dict[str, str]:
    """Labels by id, as in the dashboard."""
    titles = {one["id"]: one["name"] for one in agents if one.get("name")}
    return {one["id"]: agent_label(one["id"], titles) for one in agents}


def id_of(text: str, agents: list[Found]) -> str:
    """Id of an agent by id, name, or beginning of either.

    Raises Misuse where several begin so, and NotFound where none does.
    """
    labels = labels_of(agents)
    if text in labels:
        return text
    exact = [agent for agent, label in labels.items() if label == text]
    found = exact or [
        agent
        for agent, label in labels.items()
        if agent.startswith(text) or label.casefold().startswith(text.casefold())
    ]
    if len(found) == 1:
        return found[0]
    shown = found or list(labels)
    names = ", ".join(
        agent if labels[agent] == agent else f"{labels[agent]} ({agent})"
        for agent in shown[:MAX_NAMED]
    )
    if found:
        raise Misuse(f"several agents begin with `{text}`: {names}")
    raise NotFound(f"there is no agent {text}" + (f"; there is {names}" if names else ""))


def groups(agents: list[Found]) -> list[list[Found]]:
    """Conversations of the same name together, the first of each group first.

    An agent that its client named is a group of its own.
    """
    from mlxstack.policy.kv.conversation_id import is_implicit

    found: dict[tuple[str, str], list[Found]] = {}
    for one in agents:
        name = one.get("name") if is_implicit(one["id"]) else ""
        found.setdefault(("name", name) if name else ("id", one["id"]), []).append(one)
    return list(found.values())
