"""Which slot an ask gets: its pin, its own old seat, an empty one, the longest idle one."""

from collections.abc import Callable

from mlxstack.policy.desk import Desk, Seat, SeatState, Ticket

Match = Callable[[str, int], int]
"""(ask, slot) -> how many first tokens of the ask's prompt the slot's context shares."""

KEEP = 0.5
"""An ask continues a context when it keeps at least this share of it."""


def choose(desk: Desk, ticket: Ticket, match: Match, barred: frozenset[int]) -> int | None:
    """The slot for this ticket now, or None: wait. `barred` slots are not to be given away.

    A context that the ask would mostly throw away is not "its own seat": a title request must
    not destroy the long conversation whose head it shares.
    """
    idle = [s for s in desk.seats if s.state is SeatState.IDLE and s.id not in barred]
    if ticket.pin is not None:
        return ticket.pin if any(s.id == ticket.pin for s in idle) else None
    if not idle:
        return None
    shared = {s.id: match(ticket.ask, s.id) for s in idle if s.n_tokens}
    own = [s for s in idle if s.n_tokens and shared[s.id] >= KEEP * s.n_tokens]
    if own:
        return max(own, key=lambda s: (shared[s.id], s.last_used)).id
    return _least_missed(idle).id


def _least_missed(idle: list[Seat]) -> Seat:
    return min(idle, key=lambda s: (s.n_tokens > 0, s.last_used, s.id))
