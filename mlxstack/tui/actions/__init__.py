"""Actions of the dashboard, for footer, palette, help and docs."""

from mlxstack.tui.actions.action import Action, ActionTarget
from mlxstack.tui.actions.agents import ACTIONS as AGENT_ACTIONS
from mlxstack.tui.actions.prefix_cache import ACTIONS as CACHE_ACTIONS
from mlxstack.tui.actions.service import ACTIONS as SERVICE_ACTIONS
from mlxstack.tui.actions.slots import ACTIONS as SLOT_ACTIONS

ACTIONS: tuple[Action, ...] = (*SLOT_ACTIONS, *SERVICE_ACTIONS, *CACHE_ACTIONS, *AGENT_ACTIONS)


def actions_of(targets: tuple[ActionTarget, ...]) -> tuple[Action, ...]:
    """List the actions on these targets, in the order of the footer."""
    return tuple(action for action in ACTIONS if action.target in targets)


def action_of(name: str) -> Action:
    """Find the action of this id."""
    return next(action for action in ACTIONS if action.id == name)
