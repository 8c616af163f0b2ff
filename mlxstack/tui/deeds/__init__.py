"""What a person can do to a service from the dashboard."""

from mlxstack.tui.deeds.deed import Aim, Calls, Deed, Hands, Machine, Target, Wants
from mlxstack.tui.deeds.registry import DEEDS, deed_of, deeds_of

__all__ = [
    "DEEDS",
    "Aim",
    "Calls",
    "Deed",
    "Hands",
    "Machine",
    "Target",
    "Wants",
    "deed_of",
    "deeds_of",
]
