"""The scheduler: a pure function from what is on the desk to what is done in this turn."""

from msgspec import Struct

from mlxstack.policy import waiting
from mlxstack.policy.desk import (
    QueuedRequest,
    SchedulerState,
    SlotAction,
    SlotState,
    assign_slot,
    dequeue,
    enqueue,
    reserve_slot,
    skip,
)
from mlxstack.policy.pacing import PrefillPolicy, chunk_size, next_to_prefill
from mlxstack.policy.seats import (
    OverlapFn,
    SharedPrefillFn,
    no_shared_prefill,
    select_slot,
    should_wait_for_prefix,
)
from mlxstack.policy.speed import ThroughputModel


class SchedulerLimits(Struct, frozen=True):
    """`max_active` seats prefill or decode at once; `max_waiting` tickets queue at most.

    `max_bytes` of live KV fit beside each other; None is no bound.
    """

    max_active: int = 8
    max_waiting: int = 64
    max_bytes: int | None = None
    aging_per_s: float = 0.1
    pace: PrefillPolicy = PrefillPolicy()


class AssignSlot(Struct, frozen=True):
    """Seat this ticket in `slot`."""

    queued: QueuedRequest
    slot: int


class Expire(Struct, frozen=True):
    """The ticket's deadline has passed. If it has a seat, that is the caller's to release."""

    queued: QueuedRequest


class RunSlotAction(Struct, frozen=True):
    """Do this errand now; its slot is held."""

    action: SlotAction


class PrefillChunk(Struct, frozen=True):
    """Compute the next `n_tokens` of the prompt in `slot`."""

    slot: int
    n_tokens: int


Action = AssignSlot | Expire | RunSlotAction | PrefillChunk


def is_full(
    desk: SchedulerState, ticket: QueuedRequest, now: float, limits: SchedulerLimits
) -> bool:
    """Whether this ask has to be refused: with it, too many would wait after the next `decide`."""
    after, _ = schedule(enqueue(desk, ticket), now, limits, lambda ask, slot: 0)
    return len(after.waiting) > limits.max_waiting


def schedule(
    desk: SchedulerState,
    now: float,
    limits: SchedulerLimits,
    match: OverlapFn,
    promise: SharedPrefillFn = no_shared_prefill,
) -> tuple[SchedulerState, list[Action]]:
    """Who leaves the queue, which errands run, who is seated. Prefill is `choose_bite`'s.

    Work conserving: while a row of the batch is free and a seat without an older errand is idle,
    no ticket waits but for its pin, its agent, a prompt that a slot is computing for it, or
    memory.
    Deciding again at once changes nothing.
    """
    actions: list[Action] = []
    for late in waiting.expired(desk, now):
        desk = dequeue(desk, late.request)
        actions.append(Expire(late))
    for errand in desk.actions:
        if desk.slot(errand.slot).state is SlotState.IDLE and _is_first(desk, errand):
            desk = reserve_slot(desk, errand)
            actions.append(RunSlotAction(errand))
    tickets = waiting.schedulable(desk, now, limits.aging_per_s)
    while _has_room(desk, limits) and (ticket := next(tickets, None)):
        if should_wait_for_prefix(desk, ticket, promise):
            continue
        if not _fits(desk, ticket, limits):
            # Nobody smaller slips past, or a large prompt would wait for ever.
            break
        slot = select_slot(desk, ticket, match, _barred(desk, ticket))
        if slot is not None:
            desk = assign_slot(desk, ticket, slot)
            actions.append(AssignSlot(ticket, slot))
    return desk, actions


def next_prefill_chunk(
    desk: SchedulerState, speed: ThroughputModel, pace: PrefillPolicy
) -> tuple[SchedulerState, PrefillChunk | None]:
    """The bite of this turn, or None when nobody has a prompt to compute."""
    seats = [s for s in desk.slots if s.state is SlotState.PREFILLING]
    if not seats:
        return desk, None
    n_decoding = sum(s.state is SlotState.RUNNING for s in desk.slots)
    seat = next_to_prefill(seats, pace)
    n_tokens = chunk_size(seat, n_decoding, speed, pace)
    return skip(desk, seat.id), PrefillChunk(seat.id, n_tokens)


def _has_room(desk: SchedulerState, limits: SchedulerLimits) -> bool:
    is_idle = any(seat.state is SlotState.IDLE for seat in desk.slots)
    return is_idle and desk.n_active < limits.max_active


def _fits(desk: SchedulerState, ticket: QueuedRequest, limits: SchedulerLimits) -> bool:
    """Whether its KV fits beside the active ones; alone it is never kept waiting."""
    if limits.max_bytes is None or not desk.n_active:
        return True
    return desk.active_bytes + ticket.n_bytes <= limits.max_bytes


def _is_first(desk: SchedulerState, errand: SlotAction) -> bool:
    """Pinned asks that came earlier go before an errand; errands are in order of arrival."""
    return all(t.pin != errand.slot or t.arrived >= errand.arrived for t in desk.waiting)


def _barred(desk: SchedulerState, ticket: QueuedRequest) -> frozenset[int]:
    """Slots with an errand that came before this ticket."""
    return frozenset(e.slot for e in desk.actions if e.arrived < ticket.arrived)
