"""The scheduler: a pure function from what is on the desk to what is done in this turn."""

from msgspec import Struct

from mlxstack.core.preset import Preset
from mlxstack.policy import request_queue
from mlxstack.policy.chunked_prefill import PrefillPolicy, chunk_size, next_to_prefill
from mlxstack.policy.kv_geometry_by_model import MAX_SCORE_BYTES
from mlxstack.policy.scheduler_state import (
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
from mlxstack.policy.slot_selection import (
    OverlapFn,
    SharedPrefillFn,
    no_shared_prefill,
    select_slot,
    should_wait_for_prefix,
)
from mlxstack.policy.throughput_model import ThroughputModel


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
    state: SchedulerState, ticket: QueuedRequest, now: float, limits: SchedulerLimits
) -> bool:
    """Whether this ask has to be refused: with it, too many would wait after the next `decide`."""
    after, _ = schedule(enqueue(state, ticket), now, limits, lambda request, slot: 0)
    return len(after.waiting) > limits.max_waiting


def schedule(
    state: SchedulerState,
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
    for late in request_queue.expired(state, now):
        state = dequeue(state, late.request)
        actions.append(Expire(late))
    for pending in state.actions:
        if state.slot(pending.slot).state is SlotState.IDLE and _is_first(state, pending):
            state = reserve_slot(state, pending)
            actions.append(RunSlotAction(pending))
    tickets = request_queue.schedulable(state, now, limits.aging_per_s)
    while _has_room(state, limits) and (ticket := next(tickets, None)):
        if should_wait_for_prefix(state, ticket, promise):
            continue
        if not _fits(state, ticket, limits):
            # Nobody smaller slips past, or a large prompt would wait for ever.
            break
        slot = select_slot(state, ticket, match, _barred(state, ticket))
        if slot is not None:
            state = assign_slot(state, ticket, slot)
            actions.append(AssignSlot(ticket, slot))
    return state, actions


def next_prefill_chunk(
    state: SchedulerState, speed: ThroughputModel, pace: PrefillPolicy
) -> tuple[SchedulerState, PrefillChunk | None]:
    """The bite of this turn, or None when nobody has a prompt to compute."""
    slots = [s for s in state.slots if s.state is SlotState.PREFILLING]
    if not slots:
        return state, None
    n_decoding = sum(s.state is SlotState.RUNNING for s in state.slots)
    slot = next_to_prefill(slots, pace)
    n_tokens = chunk_size(slot, n_decoding, speed, pace)
    return skip(state, slot.id), PrefillChunk(slot.id, n_tokens)


def _has_room(state: SchedulerState, limits: SchedulerLimits) -> bool:
    is_idle = any(slot.state is SlotState.IDLE for slot in state.slots)
    return is_idle and state.n_active < limits.max_active


def _fits(state: SchedulerState, ticket: QueuedRequest, limits: SchedulerLimits) -> bool:
    """Whether its KV fits beside the active ones; alone it is never kept waiting."""
    if limits.max_bytes is None or not state.n_active:
        return True
    return state.active_bytes + ticket.n_bytes <= limits.max_bytes


def _is_first(state: SchedulerState, pending: SlotAction) -> bool:
    """Pinned asks that came earlier go before an errand; errands are in order of arrival."""
    return all(t.pin != pending.slot or t.arrived >= pending.arrived for t in state.waiting)


def _barred(state: SchedulerState, ticket: QueuedRequest) -> frozenset[int]:
    """Slots with an errand that came before this ticket."""
    return frozenset(e.slot for e in state.actions if e.arrived < ticket.arrived)


def limits_of(preset: Preset, budget: int | None, score_bytes: int = 0) -> SchedulerLimits:
    """The scheduler's limits as the preset states them; `budget` is bytes of KV, or none.

    `score_bytes` is what unfused attention stores per query token and context token.
    """
    block = preset.prefix_cache.block_size
    pace = PrefillPolicy(
        max_stall_s=preset.prefill.max_stall_ms / 1000,
        max_chunk_size=preset.prefill.chunk_size,
        block=block,
        score_bytes=score_bytes,
        max_score_bytes=MAX_SCORE_BYTES,
    )
    return SchedulerLimits(
        max_active=preset.batch.max_size if preset.batch.enabled else 1,
        max_waiting=preset.queue.max_waiting,
        max_bytes=budget,
        aging_per_s=preset.queue.aging_per_s,
        pace=pace,
    )
