"""Actions on an agent: park, pin, unpin, set the priority, delete."""

from urllib.parse import quote

from mlxstack.core.formatting import printable, size
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import tokens
from mlxstack.tui.views.names import agent_name


async def park(context: ActionContext, aim: Aim) -> str:
    """Evict the agent from slot and memory; its files on disk stay."""
    done = await context.calls.delete(f"{_path(aim.key)}?evict_only=1")
    return f"{aim.key} left the memory: {done.get('n_evicted', 0)} tokens were in a slot"


async def pin(context: ActionContext, aim: Aim) -> str:
    """Exempt its KV from eviction."""
    await context.calls.post(_path(aim.key), {"is_pinned": True})
    return f"{aim.key} is pinned"


async def unpin(context: ActionContext, aim: Aim) -> str:
    """Make its KV evictable again."""
    await context.calls.post(_path(aim.key), {"is_pinned": False})
    return f"{aim.key} is no longer pinned"


async def prioritise(context: ActionContext, aim: Aim) -> str:
    """Set the priority, from its next request on."""
    await context.calls.post(_path(aim.key), {"priority": aim.text})
    return f"{aim.key} has priority {aim.text}"


async def delete(context: ActionContext, aim: Aim) -> str:
    """Delete its history, KV and statistics."""
    await context.calls.delete(_path(aim.key))
    return f"{aim.key} was deleted"


def _path(agent: str) -> str:
    return f"/v1/agents/{quote(agent, safe='')}"


def _told(model: DashboardState, key: str) -> str:
    one = next((view for view in model.frame.agents or () if view.id == key), None)
    name, shown = agent_name(model, key), printable(key, 60)
    known = [shown] if name != shown else []
    if one is not None:
        known += [f"{tokens(one.n_tokens)} tokens", size(one.n_bytes)]
    return f"{name} ({', '.join(known)})" if known else name


ACTIONS: tuple[Action, ...] = (
    Action(
        id="park",
        key="p",
        label="Park",
        help="Free the slot and the memory of the chosen agent; what is on disk brings it back.",
        target=ActionTarget.AGENT,
        describe=lambda model, key: f"Take {_told(model, key)} out of its slot and memory?",
        do=park,
    ),
    Action(
        id="pin_agent",
        key="i",
        label="Pin",
        help="Exempt the KV of the chosen agent from eviction.",
        target=ActionTarget.AGENT,
        describe=lambda model, key: f"Exempt the KV of {_told(model, key)} from eviction?",
        do=pin,
    ),
    Action(
        id="unpin_agent",
        key="u",
        label="Unpin",
        help="Make the KV of the chosen pinned agent evictable again.",
        target=ActionTarget.AGENT,
        describe=lambda model, key: f"Unpin {_told(model, key)}? Its KV can be evicted then.",
        do=unpin,
    ),
    Action(
        id="prioritise",
        key="o",
        label="Priority",
        help="Set the queue priority of the chosen agent: high, normal or low.",
        target=ActionTarget.AGENT,
        wants=ActionInput.PRIORITY,
        describe=lambda model, key: f"Which priority has {_told(model, key)} from now on?",
        do=prioritise,
    ),
    Action(
        id="delete",
        key="D",
        label="Delete",
        help="Delete history and KV of the chosen agent; its files go with the next gc.",
        target=ActionTarget.AGENT,
        describe=lambda model, key: (
            f"Delete {_told(model, key)}? Its history goes too; this cannot be undone."
        ),
        is_destructive=True,
        do=delete,
    ),
)
