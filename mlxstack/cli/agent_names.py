"""Agents by the names that people see: labels, beginnings, groups."""

from typing import Any

from mlxstack.cli.exit_codes import Misuse
from mlxstack.core.agent_labels import agent_label
from mlxstack.core.errors import NotFound

MAX_NAMED = 5

AgentDict = dict[str, Any]


def labels_of(agents: list[AgentDict]) -> dict[str, str]:
    """Labels by id, as in the dashboard."""
    titles = {agent["id"]: agent["name"] for agent in agents if agent.get("name")}
    return {agent["id"]: agent_label(agent["id"], titles) for agent in agents}


def id_of(text: str, agents: list[AgentDict]) -> str:
    """Id of an agent by id, name, or beginning of either.

    Raises Misuse where several begin so, and NotFound where none does.
    """
    labels = labels_of(agents)
    if text in labels:
        return text
    exact = [agent for agent, label in labels.items() if label == text]
    matches = exact or [
        agent
        for agent, label in labels.items()
        if agent.startswith(text) or label.casefold().startswith(text.casefold())
    ]
    if len(matches) == 1:
        return matches[0]
    listed = matches or list(labels)
    names = ", ".join(
        agent if labels[agent] == agent else f"{labels[agent]} ({agent})"
        for agent in listed[:MAX_NAMED]
    )
    if matches:
        raise Misuse(f"several agents begin with `{text}`: {names}")
    if names:
        raise NotFound(f"there is no agent {text}; there is {names}")
    raise NotFound(f"there is no agent {text}")


def groups(agents: list[AgentDict]) -> list[list[AgentDict]]:
    """Conversations of the same name together, the first of each group first.

    An agent that its client named is a group of its own.
    """
    from mlxstack.policy.kv.conversation_id import is_implicit

    grouped: dict[tuple[str, str], list[AgentDict]] = {}
    for agent in agents:
        key = ("id", agent["id"])
        if is_implicit(agent["id"]) and agent.get("name"):
            key = ("name", agent["name"])
        grouped.setdefault(key, []).append(agent)
    return list(grouped.values())
