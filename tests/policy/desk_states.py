"""Small words for tests of the desk."""

from typing import Any

from msgspec.structs import replace

from mlxstack.core.ask import Priority
from mlxstack.policy.desk import (
    Desk,
    Seat,
    SeatState,
    Ticket,
    advance,
    arrive,
    empty_desk,
    release,
    sit,
)
from mlxstack.policy.scheduler import Action, Give, Limits, Run, decide
from mlxstack.policy.seats import Promise

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def ticket(ask: str, arrived: float = 0.0, priority: Priority = NORMAL, **more: Any) -> Ticket:
    """A prompt of 100 tokens unless told otherwise."""
    return Ticket(ask, more.pop("n_prompt", 100), arrived, priority, **more)


def desk_of(n_slots: int, *waiting: Ticket) -> Desk:
    """Empty seats, and these tickets in the queue."""
    desk = empty_desk(n_slots)
    for one in waiting:
        desk = arrive(desk, one)
    return desk


def nothing(ask: str, slot: int) -> int:
    """No context shares anything with any ask."""
    return 0


def turn(desk: Desk, now: float = 0.0, limits: Limits | None = None) -> tuple[Desk, list[Action]]:
    """`decide` with cold caches."""
    return decide(desk, now, limits or Limits(), nothing)


def given(actions: list[Action]) -> list[tuple[str, int]]:
    """(ask, slot) of everyone who was seated, in order."""
    return [(a.ticket.ask, a.slot) for a in actions if isinstance(a, Give)]


def begun(actions: list[Action]) -> list[str]:
    """Ids of the errands that were begun."""
    return [a.errand.id for a in actions if isinstance(a, Run)]


def used(
    desk: Desk, slot: int, n_prompt: int, n_tokens: int, now: float = 0.0, name: str | None = None
) -> Desk:
    """A request of conversation `name` was served here and left a context of `n_tokens`."""
    desk = sit(desk, ticket(f"before-{slot}", n_prompt=n_prompt, name=name), slot)
    return release(advance(desk, slot, n_prompt - 1), slot, n_tokens, now)


def serve_one_by_one(desk: Desk, now: float = 0.0) -> list[str]:
    """The order in which a desk of one slot serves its queue."""
    order: list[str] = []
    while True:
        desk, actions = turn(desk, now)
        if not given(actions):
            return order
        ((ask, slot),) = given(actions)
        order.append(ask)
        desk = release(desk, slot, 100, now)


def is_agents_turn(desk: Desk, ticket: Ticket) -> bool:
    """No other ask of this explicit agent is being served or came earlier."""
    if ticket.agent is None:
        return True
    seated = [s.ticket for s in desk.seats if s.ticket]
    mine = [t for t in desk.waiting if t.agent == ticket.agent]
    is_first = min(mine, key=lambda t: t.arrived) == ticket
    return is_first and all(t.agent != ticket.agent for t in seated)


def open_seats(desk: Desk, ticket: Ticket) -> set[int]:
    """Idle seats that this ticket may take: its pin, and none with an older errand."""
    barred = {e.slot for e in desk.errands if e.arrived < ticket.arrived}
    idle = {s.id for s in desk.seats if s.state is SeatState.IDLE} - barred
    return idle if ticket.pin is None else idle & {ticket.pin}


def heads_for(desk: Desk, ticket: Ticket, promise: Promise) -> list[Seat]:
    """Seats that have yet to compute or to load what this ticket needs too."""
    busy = [s for s in desk.seats if s.state in (SeatState.LOADING, SeatState.PREFILLING)]
    return [s for s in busy if s.ticket and promise(ticket.ask, s.ticket.ask) > s.position]


def put(desk: Desk, seat: Seat) -> Desk:
    """The desk with this seat in place of the one of its id."""
    seats = tuple(seat if s.id == seat.id else s for s in desk.seats)
    return replace(desk, seats=seats)
