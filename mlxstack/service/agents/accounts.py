"""Opens the accounts of the agents that earlier runs left, and says what is kept of one."""

import logging

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import StackError
from mlxstack.core.request import Priority
from mlxstack.service.agents.registry import AgentRecord, AgentRegistry, AgentSums
from mlxstack.service.agents.store import AgentStore
from mlxstack.store.agent_history import History

log = logging.getLogger("mlxstack.agents")


class AgentFacts(Struct, frozen=True):
    """What history.json says of an agent beside its messages; `used_at` is Unix seconds."""

    priority: Priority = Priority.NORMAL
    is_pinned: bool = False
    sums: AgentSums = AgentSums()
    used_at: float = 0.0
    tools: tuple[Tool, ...] = ()


def load(agent_store: AgentStore, agent_registry: AgentRegistry) -> None:
    """Before anything is served. What is damaged is named in the log, and its agent is known."""
    agent_store.survey()
    for agent in agent_store.agents():
        record = agent_registry.record(agent, is_explicit=True)
        try:
            facts = facts_of(agent_store.read(agent))
        except StackError as error:
            log.warning("%s", error)
            continue
        record.priority, record.is_pinned = facts.priority, facts.is_pinned
        record.sums, record.used_at = facts.sums, facts.used_at


def facts_about(record: AgentRecord, tools: tuple[Tool, ...]) -> AgentFacts:
    """What is to be kept of an account."""
    return AgentFacts(record.priority, record.is_pinned, record.sums, record.used_at, tools)


def facts_of(history: History) -> AgentFacts:
    """Facts that make no sense are as none."""
    try:
        return msgspec.convert(history.facts, AgentFacts)
    except msgspec.ValidationError as error:
        log.warning("the facts of a stored history are ignored: %s", error)
        return AgentFacts()
