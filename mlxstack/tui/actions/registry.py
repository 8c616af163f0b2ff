"""All deeds; footer, palette, help and docs derive from this list."""

from mlxstack.tui.actions import agents, prefix_cache, service, slots
from mlxstack.tui.actions.action import Action, ActionTarget

DEEDS: tuple[Action, ...] = (*slots.DEEDS, *service.DEEDS, *prefix_cache.DEEDS, *agents.DEEDS)


def actions_of(targets: frozenset[ActionTarget]) -> tuple[Action, ...]:
    """The deeds of a screen that shows such things, in the order of the footer."""
    return tuple(action for action in DEEDS if action.target in targets)


def action_of(name: str) -> Action:
    """The deed of this id."""
    return next(action for action in DEEDS if action.id == name)
