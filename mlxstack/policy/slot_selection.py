"""Which slot an ask gets: its pin, its own old seat, an empty one, the longest idle one."""

from collections.abc import Callable

from mlxstack.policy.scheduler_state import QueuedRequest, SchedulerState, Slot, SlotState

OverlapFn = Callable[[str, int], int]
"""(ask, slot) -> how many first tokens of the ask's prompt the slot's context shares."""

SharedPrefillFn = Callable[[str, str], int]
"""(ask, other ask) -> up to where the prefill of the other does the ask's work too, or 0."""

COMPUTING = frozenset((SlotState.LOADING, SlotState.PREFILLING))

KEEP = 0.5
"""With no empty seat left, an ask takes a context of which it keeps at least this share."""

SLACK = 32
"""Tokens of the last prompt that a known follow-up may lose: templates rewrite the very end."""


def select_slot(
    state: SchedulerState, ticket: QueuedRequest, match: OverlapFn, barred: frozenset[int]
) -> int | None:
    """The slot for this ticket now, or None: wait. `barred` slots are not to be given away.

    A follow-up is of the same conversation and repeats the last prompt of its seat. A title
    request, another conversation or an edited one only shares a prefix with it, and takes an
    empty seat rather than destroy the rest; the engine forks the prefix from there. Slots that
    others wait for by pin are taken last.
    """
    idle = [s for s in state.slots if s.state is SlotState.IDLE and s.id not in barred]
    if ticket.pin is not None:
        return ticket.pin if any(s.id == ticket.pin for s in idle) else None
    wanted = {t.pin for t in state.waiting}
    shared = {s.id: match(ticket.request, s.id) if s.n_tokens else 0 for s in idle}
    own = [s for s in idle if _continues(s, ticket, shared[s.id])]
    empty = [s for s in idle if not s.n_tokens and s.id not in wanted]
    alike = [s for s in idle if s.n_tokens and shared[s.id] >= KEEP * s.n_tokens]
    for slots in (own, () if empty else alike):
        if slots:
            return max(slots, key=lambda s: (shared[s.id], s.last_used)).id
    least_missed = min(idle, key=lambda s: (s.id in wanted, *_worth(s)), default=None)
    return least_missed.id if least_missed else None


def no_shared_prefill(_ask: str, _other: str) -> int:
    """Nobody computes what another one waits for."""
    return 0


def should_wait_for_prefix(
    state: SchedulerState, ticket: QueuedRequest, promise: SharedPrefillFn
) -> bool:
    """Whether a slot is just computing what this ticket would compute next: wait, then fork."""
    return any(
        slot.position < promise(ticket.request, slot.queued.request)
        for slot in state.slots
        if slot.state in COMPUTING and slot.queued
    )


def _continues(slot: Slot, ticket: QueuedRequest, n_shared: int) -> bool:
    """Whether the prompt goes on with the conversation of this seat, as far as can be known.

    Short user messages make the prompts of two conversations alike but for their last tokens:
    only names tell them apart. Without names, a follow-up repeats the last prompt to its end.
    """
    if slot.name is not None and ticket.name is not None and slot.name != ticket.name:
        return False
    n_prompt = slot.n_prompt or slot.n_tokens
    is_restored = not slot.n_prompt
    is_known = is_restored or (slot.name is not None and slot.name == ticket.name)
    slack = min(SLACK, n_prompt // 4) if is_known else 0
    return n_shared > 0 and n_prompt - n_shared <= slack


def _worth(slot: Slot) -> tuple[bool, float, int]:
    return slot.n_tokens > 0, slot.last_used, slot.id
