"""What can be done to an agent: park, pin, unpin, give it a priority, delete it."""

from urllib.parse import quote

from mlxstack.core.formatting import printable, size
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import tokens


async def park(hands: ActionContext, aim: Aim) -> str:
    """What is on disk stays, and brings it back."""
    done = await hands.calls.delete(f"{_path(aim.key)}?evict_only=1")
    return f"{aim.key} left the memory: {done.get('n_evicted', 0)} tokens were in a slot"


async def pin(hands: ActionContext, aim: Aim) -> str:
    """Its KV stays in memory whatever happens."""
    await hands.calls.post(_path(aim.key), {"is_pinned": True})
    return f"{aim.key} is pinned"


async def unpin(hands: ActionContext, aim: Aim) -> str:
    """Its KV stays in memory until the room is needed."""
    await hands.calls.post(_path(aim.key), {"is_pinned": False})
    return f"{aim.key} is no longer pinned"


async def prioritise(hands: ActionContext, aim: Aim) -> str:
    """From its next request on."""
    await hands.calls.post(_path(aim.key), {"priority": aim.words})
    return f"{aim.key} has priority {aim.words}"


async def delete(hands: ActionContext, aim: Aim) -> str:
    """History, KV and account."""
    await hands.calls.delete(_path(aim.key))
    return f"{aim.key} is forgotten"


def _path(agent: str) -> str:
    return f"/v1/agents/{quote(agent, safe='')}"


def _told(model: DashboardState, key: str) -> str:
    one = next((view for view in model.frame.agents or () if view.id == key), None)
    if one is None:
        return printable(key, 60)
    return f"{printable(key, 60)} ({tokens(one.n_tokens)} tokens, {size(one.n_bytes)})"


DEEDS: tuple[Action, ...] = (
    Action(
        id="park",
        key="p",
        label="Park",
        help="Free the slot and the memory of the chosen agent; what is on disk brings it back.",
        target=ActionTarget.AGENT,
        wants=ActionInput.CONSENT,
        describe=lambda model, key: f"Take {_told(model, key)} out of its slot and memory?",
        do=park,
    ),
    Action(
        id="pin_agent",
        key="i",
        label="Pin",
        help="Keep the KV of the chosen agent in memory, whatever happens.",
        target=ActionTarget.AGENT,
        wants=ActionInput.CONSENT,
        describe=lambda model, key: f"Keep {_told(model, key)} in memory, whatever happens?",
        do=pin,
    ),
    Action(
        id="unpin_agent",
        key="u",
        label="Unpin",
        help="Let go of the chosen pinned agent: its KV stays until its room is needed.",
        target=ActionTarget.AGENT,
        wants=ActionInput.CONSENT,
        describe=lambda model, key: f"Let go of the pinned agent {_told(model, key)}?",
        do=unpin,
    ),
    Action(
        id="prioritise",
        key="o",
        label="Priority",
        help="Say who goes first when several wait: the chosen agent is high, normal or low.",
        target=ActionTarget.AGENT,
        wants=ActionInput.PRIORITY,
        describe=lambda model, key: f"Which priority has {_told(model, key)} from now on?",
        do=prioritise,
    ),
    Action(
        id="delete",
        key="d",
        label="Delete",
        help="Forget the chosen agent: its history, its KV in memory; files go with the next gc.",
        target=ActionTarget.AGENT,
        wants=ActionInput.CONSENT,
        describe=lambda model, key: (
            f"Delete {_told(model, key)}? What it said is gone too, and cannot be brought back."
        ),
        do=delete,
    ),
)
