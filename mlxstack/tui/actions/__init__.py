"""The actions of the dashboard; footer, palette, help and docs derive from this list."""

from mlxstack.tui.actions import agents, prefix_cache, service, slots
from mlxstack.tui.actions.action import (
    Action,
    ActionContext,
    ActionInput,
    ActionTarget,
    Aim,
    LocalMachine,
    ServiceCalls,
)

__all__ = [
    "ACTIONS",
    "Action",
    "ActionContext",
    "ActionInput",
    "ActionTarget",
    "Aim",
    "LocalMachine",
    "ServiceCalls",
    "action_of",
    "actions_of",
]

ACTIONS: tuple[Action, ...] = (
    *slots.ACTIONS,
    *service.ACTIONS,
    *prefix_cache.ACTIONS,
    *agents.ACTIONS,
)


def actions_of(targets: frozenset[ActionTarget]) -> tuple[Action, ...]:
    """List the actions on these targets, in the order of the footer."""
    return tuple(action for action in ACTIONS if action.target in targets)


def action_of(name: str) -> Action:
    """Find the action of this id."""
    return next(action for action in ACTIONS if action.id == name)
