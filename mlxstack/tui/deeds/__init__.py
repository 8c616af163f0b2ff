"""What a person can do to a service from the dashboard."""

from mlxstack.tui.actions.action import (
    Action,
    ActionContext,
    ActionInput,
    ActionTarget,
    Aim,
    LocalMachine,
    ServiceCalls,
)
from mlxstack.tui.actions.registry import DEEDS, action_of, actions_of

__all__ = [
    "DEEDS",
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
