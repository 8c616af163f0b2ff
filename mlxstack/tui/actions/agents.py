"""Actions on an agent: park, pin, unpin, set the priority, delete."""

from functools import partial
from urllib.parse import quote

from mlxstack.core.formatting import count, printable, size
from mlxstack.tui.actions.action import ActionContext, ActionInput, ActionTarget, Aim, action
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name


def _path(agent: str) -> str:
    return f"/v1/agents/{quote(agent, safe='')}"


def _agent(model: DashboardState, key: str) -> str:
    agent = next((view for view in model.frame.agents or () if view.id == key), None)
    name = agent_name(model, key)
    agent_id = printable(key, 60)
    facts = []
    if name != agent_id:
        facts.append(agent_id)
    if agent is not None:
        facts += [f"{count(agent.n_tokens)} tokens", size(agent.n_bytes)]
    if not facts:
        return name
    return f"{name} ({', '.join(facts)})"


on_agent = partial(action, ActionTarget.AGENT, _agent)


@on_agent("p", "Park", "Take {} out of its slot and memory?")
async def park(context: ActionContext, aim: Aim) -> str:
    """Free the slot and the memory of the chosen agent; what is on disk brings it back."""
    done = await context.calls.delete(f"{_path(aim.key)}?evict_only=1")
    return f"{aim.key} left the memory: {done.get('n_evicted', 0)} tokens were in a slot"


@on_agent("i", "Pin", "Exempt the KV of {} from eviction?")
async def pin_agent(context: ActionContext, aim: Aim) -> str:
    """Exempt the KV of the chosen agent from eviction."""
    await context.calls.post(_path(aim.key), {"is_pinned": True})
    return f"{aim.key} is pinned"


@on_agent("u", "Unpin", "Unpin {}? Its KV can be evicted then.")
async def unpin_agent(context: ActionContext, aim: Aim) -> str:
    """Make the KV of the chosen pinned agent evictable again."""
    await context.calls.post(_path(aim.key), {"is_pinned": False})
    return f"{aim.key} is no longer pinned"


@on_agent("o", "Priority", "Which priority has {} from now on?", wants=ActionInput.PRIORITY)
async def prioritise(context: ActionContext, aim: Aim) -> str:
    """Set the queue priority of the chosen agent: high, normal or low."""
    await context.calls.post(_path(aim.key), {"priority": aim.text})
    return f"{aim.key} has priority {aim.text}"


@on_agent(
    "D", "Delete", "Delete {}? Its history goes too; this cannot be undone.", is_destructive=True
)
async def delete(context: ActionContext, aim: Aim) -> str:
    """Delete history and KV of the chosen agent; its files go with the next gc."""
    await context.calls.delete(_path(aim.key))
    return f"{aim.key} was deleted"


ACTIONS = (park, pin_agent, unpin_agent, prioritise, delete)
