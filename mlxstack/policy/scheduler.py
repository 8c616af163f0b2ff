"""Scheduler: a pure function from the scheduler state to the actions of one step.

Admission is bounded by slots, batch size and KV bytes; a request may wait for a shared prefix.
"""

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
    """Limits: `max_active` slots prefill or decode at once; `max_waiting` requests queue.

    Live KV of at most `max_bytes` is admitted; None is no bound.
    """

    max_active: int = 8
    max_waiting: int = 64
    max_bytes: int | None = None
    aging_per_s: float = 0.1
    pace: PrefillPolicy = PrefillPolicy()


class AssignSlot(Struct, frozen=True):
    """Assign this request to `slot`."""

    queued: QueuedRequest
    slot: int


class Expire(Struct, frozen=True):
    """The request's deadline has passed. The caller releases its slot, if it has one."""

    queued: QueuedRequest


class RunSlotAction(Struct, frozen=True):
    """Run this slot action now; its slot is reserved."""

    action: SlotAction


class PrefillChunk(Struct, frozen=True):
    """Compute the next `n_tokens` of the prompt in `slot`."""

    slot: int
    n_tokens: int


Action = AssignSlot | Expire | RunSlotAction | PrefillChunk


def is_full(
    state: SchedulerState, queued: QueuedRequest, now: float, limits: SchedulerLimits
) -> bool:
    """Whether admission must refuse this request because too many would wait."""
    after, _ = schedule(enqueue(state, queued), now, limits, lambda request, slot: 0)
    return len(after.waiting) > limits.max_waiting


def schedule(
    state: SchedulerState,
    now: float,
    limits: SchedulerLimits,
    match: OverlapFn,
    promise: SharedPrefillFn = no_shared_prefill,
) -> tuple[SchedulerState, list[Action]]:
    """Expire and admit requests, and start slot actions; see `next_prefill_chunk` for prefill.

    Work conserving: while the batch has a free row and an idle slot without an older action, a
    request waits only for its pinned slot, its agent, a shared prefix being computed, or memory.
    Scheduling again at once changes nothing.
    """
    actions: list[Action] = []
    for late in request_queue.expired(state, now):
        state = dequeue(state, late.request)
        actions.append(Expire(late))
    for pending in state.actions:
        if state.slot(pending.slot).state is SlotState.IDLE and _is_first(state, pending):
            state = reserve_slot(state, pending)
            actions.append(RunSlotAction(pending))
    requests = request_queue.schedulable(state, now, limits.aging_per_s)
    while _has_room(state, limits) and (queued := next(requests, None)):
        if should_wait_for_prefix(state, queued, promise):
            continue
        if not _fits(state, queued, limits):
            # Smaller requests do not overtake, or a large prompt would starve.
            break
        slot = select_slot(state, queued, match, _barred(state, queued))
        if slot is not None:
            state = assign_slot(state, queued, slot)
            actions.append(AssignSlot(queued, slot))
    return state, actions


def next_prefill_chunk(
    state: SchedulerState, speed: ThroughputModel, pace: PrefillPolicy
) -> tuple[SchedulerState, PrefillChunk | None]:
    """The prefill chunk of this step, or None when no slot has a prompt to compute."""
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


def _fits(state: SchedulerState, queued: QueuedRequest, limits: SchedulerLimits) -> bool:
    """Whether its KV fits beside the active ones; alone it is never kept waiting."""
    if limits.max_bytes is None or not state.n_active:
        return True
    return state.active_bytes + queued.n_bytes <= limits.max_bytes


def _is_first(state: SchedulerState, pending: SlotAction) -> bool:
    """Whether no older pinned request wants the slot; actions run in order of arrival."""
    return all(t.pin != pending.slot or t.arrived >= pending.arrived for t in state.waiting)


def _barred(state: SchedulerState, queued: QueuedRequest) -> frozenset[int]:
    """Slots with an action that is older than this request."""
    return frozenset(e.slot for e in state.actions if e.arrived < queued.arrived)


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
