"""The scheduler: a pure function from what is on the desk to what is done in this turn."""

from msgspec import Struct

from mlxstack.policy import waiting
from mlxstack.policy.desk import (
    Desk,
    Errand,
    SeatState,
    Ticket,
    arrive,
    hold,
    leave_queue,
    pass_over,
    sit,
)
from mlxstack.policy.pacing import Pace, bite, next_to_prefill
from mlxstack.policy.seats import Match, Promise, choose, is_awaiting, no_promise
from mlxstack.policy.speed import Speed


class Limits(Struct, frozen=True):
    """`max_active` seats prefill or decode at once; `max_waiting` tickets queue at most.

    `max_bytes` of live KV fit beside each other; None is no bound.
    """

    max_active: int = 8
    max_waiting: int = 64
    max_bytes: int | None = None
    aging_per_s: float = 0.1
    pace: Pace = Pace()


class Give(Struct, frozen=True):
    """Seat this ticket in `slot`."""

    ticket: Ticket
    slot: int


class Expire(Struct, frozen=True):
    """The ticket's deadline has passed. If it has a seat, that is the caller's to release."""

    ticket: Ticket


class Run(Struct, frozen=True):
    """Do this errand now; its slot is held."""

    errand: Errand


class Prefill(Struct, frozen=True):
    """Compute the next `n_tokens` of the prompt in `slot`."""

    slot: int
    n_tokens: int


Action = Give | Expire | Run | Prefill


def is_full(desk: Desk, ticket: Ticket, now: float, limits: Limits) -> bool:
    """Whether this ask has to be refused: with it, too many would wait after the next `decide`."""
    after, _ = decide(arrive(desk, ticket), now, limits, lambda ask, slot: 0)
    return len(after.waiting) > limits.max_waiting


def decide(
    desk: Desk, now: float, limits: Limits, match: Match, promise: Promise = no_promise
) -> tuple[Desk, list[Action]]:
    """Who leaves the queue, which errands run, who is seated. Prefill is `choose_bite`'s.

    Work conserving: while a row of the batch is free and a seat without an older errand is idle,
    no ticket waits but for its pin, its agent, a prompt that a slot is computing for it, or
    memory.
    Deciding again at once changes nothing.
    """
    actions: list[Action] = []
    for late in waiting.overdue(desk, now):
        desk = leave_queue(desk, late.ask)
        actions.append(Expire(late))
    for errand in desk.errands:
        if desk.seat(errand.slot).state is SeatState.IDLE and _is_first(desk, errand):
            desk = hold(desk, errand)
            actions.append(Run(errand))
    tickets = waiting.ready(desk, now, limits.aging_per_s)
    while _has_room(desk, limits) and (ticket := next(tickets, None)):
        if is_awaiting(desk, ticket, promise):
            continue
        if not _fits(desk, ticket, limits):
            # Nobody smaller slips past, or a large prompt would wait for ever.
            break
        slot = choose(desk, ticket, match, _barred(desk, ticket))
        if slot is not None:
            desk = sit(desk, ticket, slot)
            actions.append(Give(ticket, slot))
    return desk, actions


def choose_bite(desk: Desk, speed: Speed, pace: Pace) -> tuple[Desk, Prefill | None]:
    """The bite of this turn, or None when nobody has a prompt to compute."""
    seats = [s for s in desk.seats if s.state is SeatState.PREFILLING]
    if not seats:
        return desk, None
    n_decoding = sum(s.state is SeatState.RUNNING for s in desk.seats)
    seat = next_to_prefill(seats, pace)
    n_tokens = bite(seat, n_decoding, speed, pace)
    return pass_over(desk, seat.id), Prefill(seat.id, n_tokens)


def _has_room(desk: Desk, limits: Limits) -> bool:
    is_idle = any(seat.state is SeatState.IDLE for seat in desk.seats)
    return is_idle and desk.n_active < limits.max_active


def _fits(desk: Desk, ticket: Ticket, limits: Limits) -> bool:
    """Whether its KV fits beside the active ones; alone it is never kept waiting."""
    if limits.max_bytes is None or not desk.n_active:
        return True
    return desk.active_bytes + ticket.n_bytes <= limits.max_bytes


def _is_first(desk: Desk, errand: Errand) -> bool:
    """Pinned asks that came earlier go before an errand; errands are in order of arrival."""
    return all(t.pin != errand.slot or t.arrived >= errand.arrived for t in desk.waiting)


def _barred(desk: Desk, ticket: Ticket) -> frozenset[int]:
    """Slots with an errand that came before this ticket."""
    return frozenset(e.slot for e in desk.errands if e.arrived < ticket.arrived)
