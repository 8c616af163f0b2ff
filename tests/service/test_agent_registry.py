"""Accounts of agents: however many there are, a request that ends is counted."""

from mlxstack.core.status import RequestView
from mlxstack.core.thinking import Effort
from mlxstack.service.parts.agent_registry import MAX_AGENTS, AgentRegistry, AgentSettings


def told(agent: str) -> RequestView:
    return RequestView(id=f"of {agent}", agent=agent, slot=0)


def test_a_stranger_among_a_thousand_explicit_agents_is_counted() -> None:
    roster = AgentRegistry()
    for i in range(MAX_AGENTS):
        roster.note(told(f"explicit-{i}"), 1.0, is_explicit=True)
    for name in ("passing", "passing", "another"):
        roster.note(told(name), 2.0, is_explicit=False)
    assert roster.n_agents == MAX_AGENTS + 1
    another = roster.find("another")
    assert another is not None and another.sums.n_requests == 1
    assert roster.find("passing") is None
    assert roster.find("explicit-0") is not None


def test_the_least_recently_used_name_goes_first() -> None:
    roster = AgentRegistry()
    for i in range(MAX_AGENTS):
        roster.note(told(f"{i}"), 1.0, is_explicit=False)
    roster.note(told("0"), 2.0, is_explicit=False)
    roster.note(told("new"), 3.0, is_explicit=False)
    assert roster.n_agents == MAX_AGENTS
    assert roster.find("1") is None
    assert roster.find("0") is not None


def test_agents_with_settings_stay() -> None:
    roster = AgentRegistry()
    for i in range(MAX_AGENTS):
        record = roster.record(f"{i}", is_explicit=False)
        record.settings = AgentSettings(is_pinned=i != 1)
    roster.record("new", is_explicit=False).settings = AgentSettings(effort=Effort.LOW)
    assert roster.find("0") is not None
    assert roster.find("1") is None
    roster.record("newer", is_explicit=False)
    assert roster.n_agents == MAX_AGENTS + 1
