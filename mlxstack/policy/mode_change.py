"""What has to change when the services that run are to become the members of a mode."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct


class ServiceCondition(StrEnum):
    """A service before the switch. STALE: it runs with other settings, or does not answer."""

    RIGHT = "right"
    STALE = "stale"


class ModeChange(Struct, frozen=True):
    """Names of services: first all of `stop` end, then `start` begin one after another."""

    stop: tuple[str, ...]
    start: tuple[str, ...]
    keep: tuple[str, ...]


def difference(running: Mapping[str, ServiceCondition], wanted: Sequence[str]) -> ModeChange:
    """The least change from what runs to what is wanted, in the order of `wanted`."""
    keep = tuple(name for name in wanted if running.get(name) is ServiceCondition.RIGHT)
    return ModeChange(
        stop=tuple(name for name in running if name not in keep),
        start=tuple(name for name in wanted if name not in keep),
        keep=keep,
    )
