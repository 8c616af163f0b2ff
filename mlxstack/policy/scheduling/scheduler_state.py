"""Scheduler state: slots, queue, slot actions, and their transitions. Immutable values."""

from collections.abc import Collection
from enum import StrEnum

import msgspec
from msgspec import Struct

from mlxstack.core.request import Request


class SlotState(StrEnum):
    """State of a slot.

    LOADING: KV for its prompt is read from disk. HELD: a save, restore or erase is running.
    """

    IDLE = "idle"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    HELD = "held"


ACTIVE = frozenset((SlotState.LOADING, SlotState.PREFILLING, SlotState.RUNNING))


class SlotAction(Struct, frozen=True):
    """A slot action that waits until its slot is idle."""

    id: str
    slot: int
    arrived: float


class Slot(Struct, frozen=True):
    """Slot: `position` of `n_prompt` tokens prefilled, `n_tokens` while idle.

    An idle slot remembers `n_prompt`: the length of the last prompt in tokens, 0 if unknown,
    and `name`: the agent or conversation whose context it holds, None if unknown.
    `n_passed` counts chunks of other slots since its assignment or its own last chunk;
    `has_token` says whether the request has sampled a token.
    """

    id: int
    state: SlotState = SlotState.IDLE
    request: Request | None = None
    n_tokens: int = 0
    position: int = 0
    n_prompt: int = 0
    n_passed: int = 0
    last_used: float = 0.0
    name: str | None = None
    has_token: bool = False
    before: "Slot | None" = None
    """The idle slot as it was, while its request drops its KV."""

    @property
    def n_left(self) -> int:
        """Prompt tokens left for prefill; decode computes the last one."""
        return max(0, self.n_prompt - 1 - self.position)


class SchedulerState(Struct, frozen=True):
    """State of the scheduler."""

    slots: tuple[Slot, ...]
    waiting: tuple[Request, ...] = ()
    actions: tuple[SlotAction, ...] = ()

    def slot(self, slot: int) -> Slot:
        """The slot of this id."""
        return self.slots[slot]

    @property
    def n_active(self) -> int:
        """Number of slots that prefill or decode."""
        return sum(slot.state in ACTIVE for slot in self.slots)


def idle_slots(state: SchedulerState) -> list[int]:
    """Slots that are idle but not empty, the longest unused first."""
    idle = [s for s in state.slots if s.state is SlotState.IDLE and s.n_tokens]
    return [slot.id for slot in sorted(idle, key=lambda s: s.last_used)]


def initial_state(n_slots: int) -> SchedulerState:
    """A state of `n_slots` idle, empty slots."""
    return SchedulerState(slots=tuple(Slot(id=i) for i in range(n_slots)))


def enqueue(state: SchedulerState, request: Request) -> SchedulerState:
    """Add a request to the queue."""
    return msgspec.structs.replace(state, waiting=(*state.waiting, request))


def enqueue_action(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    """Add a slot action to the queue."""
    return msgspec.structs.replace(state, actions=(*state.actions, pending))


def drop_action(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    actions = tuple(e for e in state.actions if e.id != pending.id)
    return msgspec.structs.replace(state, actions=actions)


def dequeue(state: SchedulerState, request_id: str) -> SchedulerState:
    """Remove a request from the queue; no-op if it is not queued."""
    waiting = tuple(request for request in state.waiting if request.id != request_id)
    return msgspec.structs.replace(state, waiting=waiting)


def assign_slot(state: SchedulerState, request: Request, slot: int) -> SchedulerState:
    """Give an idle slot to the request; prefill begins at position 0."""
    idle = _slot_in(state, slot, SlotState.IDLE)
    taken = msgspec.structs.replace(
        idle,
        state=SlotState.PREFILLING,
        request=request,
        position=0,
        n_prompt=len(request.tokens),
        before=idle if request.drops_kv else None,
    )
    return dequeue(_with_slot(state, taken), request.id)


def start_loading(state: SchedulerState, slot: int) -> SchedulerState:
    """Mark the slot as waiting for the disk; other slots prefill."""
    slot_state = _slot_in(state, slot, SlotState.PREFILLING)
    return _with_slot(state, msgspec.structs.replace(slot_state, state=SlotState.LOADING))


def finish_loading(state: SchedulerState, slot: int) -> SchedulerState:
    """Resume the prefill of a slot after a read, failed or not."""
    slot_state = _slot_in(state, slot, SlotState.LOADING)
    return _with_slot(state, msgspec.structs.replace(slot_state, state=SlotState.PREFILLING))


def advance(state: SchedulerState, slot: int, position: int) -> SchedulerState:
    """Move prefill to `position`; with one prompt token left the slot runs."""
    slot_state = _slot_in(state, slot, SlotState.PREFILLING)
    moved = msgspec.structs.replace(slot_state, position=position)
    if moved.n_left == 0:
        moved = msgspec.structs.replace(moved, state=SlotState.RUNNING)
    return _with_slot(state, moved)


def begin_answer(state: SchedulerState, slot: int) -> SchedulerState:
    """Note that the request in `slot` has sampled a token."""
    slot_state = state.slot(slot)
    if slot_state.has_token:
        return state
    return _with_slot(state, msgspec.structs.replace(slot_state, has_token=True))


def skip(state: SchedulerState, chosen: Collection[int]) -> SchedulerState:
    """Compute the `chosen` slots in this step; count it for the others."""
    slots = list(state.slots)
    for prefilling in state.slots:
        if prefilling.state is SlotState.PREFILLING:
            n_passed = 0 if prefilling.id in chosen else prefilling.n_passed + 1
            slots[prefilling.id] = msgspec.structs.replace(prefilling, n_passed=n_passed)
    return msgspec.structs.replace(state, slots=tuple(slots))


def reserve_slot(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    """Start a slot action in its idle slot."""
    slot = _slot_in(state, pending.slot, SlotState.IDLE)
    held = msgspec.structs.replace(slot, state=SlotState.HELD)
    return _with_slot(drop_action(state, pending), held)


def release_slot(state: SchedulerState, slot: int, n_tokens: int, now: float) -> SchedulerState:
    """Make the slot idle, with `n_tokens` of context.

    A request that only waited for the disk has not used it; the origin of its context is unknown.
    One that drops its KV leaves it as it was, or empty where that context is lost.
    """
    slot_state = state.slot(slot)
    if slot_state.before is not None:
        before = slot_state.before
        if not n_tokens:
            before = Slot(slot, last_used=before.last_used)
        return _with_slot(state, before)
    if slot_state.state is SlotState.LOADING:
        before = Slot(slot, n_tokens=n_tokens, last_used=slot_state.last_used, name=slot_state.name)
        return _with_slot(state, before)
    n_prompt = min(slot_state.n_prompt, n_tokens)
    name = slot_state.name
    if slot_state.request:
        name = slot_state.request.display_name
    return _with_slot(
        state, Slot(slot, n_tokens=n_tokens, n_prompt=n_prompt, last_used=now, name=name)
    )


def reset_slot(state: SchedulerState, slot: int, n_tokens: int, now: float) -> SchedulerState:
    """Make the slot idle with another context of `n_tokens`, of unknown origin."""
    return _with_slot(state, Slot(slot, n_tokens=n_tokens, last_used=now))


def set_context(state: SchedulerState, slot: int, n_tokens: int, n_kept: int) -> SchedulerState:
    """Note a changed context of an idle slot; `n_kept` tokens stayed."""
    idle = _slot_in(state, slot, SlotState.IDLE)
    n_prompt = min(idle.n_prompt, n_kept)
    return _with_slot(state, msgspec.structs.replace(idle, n_tokens=n_tokens, n_prompt=n_prompt))


def _slot_in(state: SchedulerState, slot: int, expected: SlotState) -> Slot:
    """The slot, which is in this state."""
    slot_state = state.slot(slot)
    assert slot_state.state is expected, f"slot {slot} is {slot_state.state}, not {expected}"
    return slot_state


def _with_slot(state: SchedulerState, slot: Slot) -> SchedulerState:
    slots = (*state.slots[: slot.id], slot, *state.slots[slot.id + 1 :])
    return msgspec.structs.replace(state, slots=slots)
