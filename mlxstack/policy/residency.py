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
    loaded = [member for member in members if member.is_loaded]
    free = budget - sum(member.n_bytes for member in loaded)
    waiting = [m for m in members if not m.is_loaded and m.waiting_since is not None]
    waiting.sort(key=lambda member: (member.waiting_since, member.name))
    leaving, look_at = _not_resident(loaded, linger_s, now)
    missing = sum(member.n_bytes for member in waiting[:1]) - free
    victims, eligible_at = _victims(loaded, missing, linger_s, now)
    spare = sum(victim.n_bytes for victim in victims) - missing
    load = []
    if missing <= 0:
        load = waiting[:1]
    free -= sum(member.n_bytes for member in load)
    for member in waiting[1:]:
        if member.n_bytes <= min(free, spare):
            load.append(member)
            free -= member.n_bytes
            spare -= member.n_bytes
    idle = {victim.name for victim in victims if not victim.n_active}
    times = [time for time in (look_at, eligible_at) if time is not None]
    return ResidencyStep(
        load=tuple(member.name for member in load),
        unload=tuple(dict.fromkeys((*sorted(idle), *leaving))),
        closed=frozenset(victim.name for victim in victims),
        look_at=min(times, default=None),
    )


def _victims(
    loaded: Sequence[MemberView], missing: int, linger_s: float, now: float
) -> tuple[list[MemberView], float | None]:
    """Members to unload for `missing` bytes, or when more may go.

    None leave while those that may are too few.
    """
    movable = [member for member in loaded if member.residency is not Residency.ALWAYS]
    movable.sort(key=lambda m: (m.residency is not Residency.NEVER, m.n_active > 0, m.used_at))
    victims: list[MemberView] = []
    for member in movable:
        if sum(victim.n_bytes for victim in victims) >= missing:
            break
        if member.loaded_at + linger_s <= now:
            victims.append(member)
    if sum(victim.n_bytes for victim in victims) >= missing:
        return victims, None
    ends = [member.loaded_at + linger_s for member in movable]
    return [], min((end for end in ends if end > now), default=None)


def _not_resident(
    loaded: Sequence[MemberView], linger_s: float, now: float
) -> tuple[tuple[str, ...], float | None]:
    """Idle members to unload now, and when the next is due."""
    ends = {
        member.name: max(member.used_at, member.loaded_at) + linger_s
        for member in loaded
        if member.residency is Residency.NEVER and not member.n_active
    }
    later = [end for end in ends.values() if end > now]
    return tuple(name for name, end in ends.items() if end <= now), min(later, default=None)
