"""Residency of models behind a gateway: loads, and evictions for them."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.preset import Residency


class MemberView(Struct, frozen=True):
    """One member of a gateway; times are monotonic seconds.

    `n_bytes` is its reservation: weights, KV, workspace. `n_active` requests are inside it, the
    last one began or ended at `used_at`. `waiting_since` is the arrival of its oldest request
    that waits.
    """

    name: str
    n_bytes: int
    residency: Residency = Residency.AUTO
    is_loaded: bool = False
    n_active: int = 0
    loaded_at: float = 0.0
    used_at: float = 0.0
    waiting_since: float | None = None


class ResidencyStep(Struct, frozen=True):
    """Next changes: members to load now, members to unload now.

    `closed` members let no request in until they were unloaded. The decision changes by itself at
    `look_at`.
    """

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    closed: frozenset[str] = frozenset()
    look_at: float | None = None


def residency_step(
    members: Sequence[MemberView], budget: int, linger_s: float, now: float
) -> ResidencyStep:
    """Decide which members to load and unload.

    Members wait in the order of their oldest requests. The first one gets its room from the least
    recently used members that have been loaded for `linger_s`; these finish their requests, then
    leave. Later ones are loaded before it only where it does not wait longer for that. Members
    over the budget, as a gateway may find them at its start, leave in the same way.
    """
    loaded = [one for one in members if one.is_loaded]
    free = budget - sum(one.n_bytes for one in loaded)
    waiting = sorted(
        (one for one in members if not one.is_loaded and one.waiting_since is not None),
        key=lambda one: (one.waiting_since, one.name),
    )
    leaving, look_at = _not_resident(loaded, linger_s, now)
    missing = sum(one.n_bytes for one in waiting[:1]) - free
    victims, eligible_at = _victims(loaded, missing, linger_s, now)
    spare = sum(one.n_bytes for one in victims) - missing
    load = waiting[:1] if missing <= 0 else []
    free -= sum(one.n_bytes for one in load)
    for one in waiting[1:]:
        if one.n_bytes <= min(free, spare):
            load.append(one)
            free -= one.n_bytes
            spare -= one.n_bytes
    idle = {one.name for one in victims if not one.n_active}
    times = [time for time in (look_at, eligible_at) if time is not None]
    return ResidencyStep(
        load=tuple(one.name for one in load),
        unload=tuple(dict.fromkeys((*sorted(idle), *leaving))),
        closed=frozenset(one.name for one in victims),
        look_at=min(times, default=None),
    )


def _victims(
    loaded: Sequence[MemberView], missing: int, linger_s: float, now: float
) -> tuple[list[MemberView], float | None]:
    """Members to unload for `missing` bytes, or when more may go.

    None leave while those that may are too few.
    """
    movable = sorted(
        (one for one in loaded if one.residency is not Residency.ALWAYS),
        key=lambda one: (one.residency is not Residency.NEVER, one.n_active > 0, one.used_at),
    )
    victims: list[MemberView] = []
    for one in movable:
        if sum(other.n_bytes for other in victims) >= missing:
            break
        if one.loaded_at + linger_s <= now:
            victims.append(one)
    if sum(one.n_bytes for one in victims) >= missing:
        return victims, None
    ends = [one.loaded_at + linger_s for one in movable]
    return [], min((end for end in ends if end > now), default=None)


def _not_resident(
    loaded: Sequence[MemberView], linger_s: float, now: float
) -> tuple[tuple[str, ...], float | None]:
    """Idle members to unload now, and when the next is due."""
    ends = {
        one.name: max(one.used_at, one.loaded_at) + linger_s
        for one in loaded
        if one.residency is Residency.NEVER and not one.n_active
    }
    later = [end for end in ends.values() if end > now]
    return tuple(name for name, end in ends.items() if end <= now), min(later, default=None)
