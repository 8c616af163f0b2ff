"""Slot selection: by pin, conversation, longest common prefix, least recent use."""

from collections.abc import Callable

from mlxstack.policy.scheduler_state import QueuedRequest, SchedulerState, Slot, SlotState

OverlapFn = Callable[[str, int], int]
"""(request, slot) -> common prefix of the prompt and the slot's context, in tokens."""

SharedPrefillFn = Callable[[str, str], int]
"""(request, other) -> prompt tokens that the prefill of the other request computes, or 0."""

COMPUTING = frozenset((SlotState.LOADING, SlotState.PREFILLING))

KEEP = 0.5
"""With no empty slot left, a request takes a context of which it keeps at least this share."""

SLACK = 32
"""Tokens of the last prompt that a known follow-up may lose: templates rewrite the very end."""


def select_slot(
    state: SchedulerState, queued: QueuedRequest, match: OverlapFn, barred: frozenset[int]
) -> int | None:
    """Select the slot for this request now, or None: wait. `barred` slots are excluded.

    A follow-up is of the same conversation and repeats the last prompt of its slot. A title
    request, another conversation or an edited one only shares a prefix with it, and takes an
    empty slot instead of overwriting it; the engine forks the prefix from there. Slots that
    other requests are pinned to are taken last.
    """
    idle = [s for s in state.slots if s.state is SlotState.IDLE and s.id not in barred]
    if queued.pin is not None:
        return queued.pin if any(s.id == queued.pin for s in idle) else None
    wanted = {t.pin for t in state.waiting}
    shared = {s.id: match(queued.request, s.id) if s.n_tokens else 0 for s in idle}
    own = [s for s in idle if _continues(s, queued, shared[s.id])]
    empty = [s for s in idle if not s.n_tokens and s.id not in wanted]
    alike = [s for s in idle if s.n_tokens and shared[s.id] >= KEEP * s.n_tokens]
    for slots in (own, () if empty else alike):
        if slots:
            return max(slots, key=lambda s: (shared[s.id], s.last_used)).id
    least_missed = min(idle, key=lambda s: (s.id in wanted, *_worth(s)), default=None)
    return least_missed.id if least_missed else None


def no_shared_prefill(_ask: str, _other: str) -> int:
    """No request waits for the prefill of another."""
    return 0


def should_wait_for_prefix(
    state: SchedulerState, queued: QueuedRequest, promise: SharedPrefillFn
) -> bool:
    """Whether a slot is computing a prefix of this prompt: wait, then fork."""
    return any(
        slot.position < promise(queued.request, slot.queued.request)
        for slot in state.slots
        if slot.state in COMPUTING and slot.queued
    )


def _continues(slot: Slot, queued: QueuedRequest, n_shared: int) -> bool:
    """Whether the prompt continues the conversation of this slot, as far as known.

    Short user messages make the prompts of two conversations alike but for their last tokens:
    only names tell them apart. Without names, a follow-up repeats the last prompt to its end.
    """
    if slot.name is not None and queued.name is not None and slot.name != queued.name:
        return False
    n_prompt = slot.n_prompt or slot.n_tokens
    is_restored = not slot.n_prompt
    is_known = is_restored or (slot.name is not None and slot.name == queued.name)
    slack = min(SLACK, n_prompt // 4) if is_known else 0
    return n_shared > 0 and n_prompt - n_shared <= slack


def _worth(slot: Slot) -> tuple[bool, float, int]:
    return slot.n_tokens > 0, slot.last_used, slot.id
