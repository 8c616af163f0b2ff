"""All deeds; footer, palette, help and docs derive from this list."""

from mlxstack.tui.deeds import agents, cache, service, slots
from mlxstack.tui.deeds.deed import Deed, Target

DEEDS: tuple[Deed, ...] = (*slots.DEEDS, *service.DEEDS, *cache.DEEDS, *agents.DEEDS)


def deeds_of(targets: frozenset[Target]) -> tuple[Deed, ...]:
    """The deeds of a screen that shows such things, in the order of the footer."""
    return tuple(deed for deed in DEEDS if deed.target in targets)


def deed_of(name: str) -> Deed:
    """The deed of this id."""
    return next(deed for deed in DEEDS if deed.id == name)
