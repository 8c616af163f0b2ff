"""The desk: who sits in which slot, who waits, and how each of these changes. All values."""

from enum import StrEnum

import msgspec
from msgspec import Struct

from mlxstack.core.request import Priority


class SlotState(StrEnum):
    """What happens in a slot.

    LOADING: KV for its prompt is read from disk. HELD: a save, restore or erase is at work.
    """

    IDLE = "idle"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    HELD = "held"


ACTIVE = frozenset((SlotState.LOADING, SlotState.PREFILLING, SlotState.RUNNING))


class QueuedRequest(Struct, frozen=True):
    """An ask that waits. `pin` is the slot it insists on; `agent` an explicit agent.

    `name` is what people see of it. `n_bytes` of live KV is what it is expected to need.
    """

    request: str
    n_prompt: int
    arrived: float
    priority: Priority = Priority.NORMAL
    pin: int | None = None
    agent: str | None = None
    deadline: float | None = None
    n_bytes: int = 0
    name: str | None = None


class SlotAction(Struct, frozen=True):
    """A slot action that waits until its slot is idle."""

    id: str
    slot: int
    arrived: float


class Slot(Struct, frozen=True):
    """A slot. `position` of `n_prompt` tokens are prefilled; `n_tokens` is the idle context.

    An idle seat remembers `n_prompt`: how many of its tokens were the last prompt, 0 if unknown,
    and `name`: the agent or conversation whose context it holds, None if unknown.
    `n_passed` counts the bites that others got since this seat sat down or got its last one.
    """

    id: int
    state: SlotState = SlotState.IDLE
    queued: QueuedRequest | None = None
    n_tokens: int = 0
    position: int = 0
    n_prompt: int = 0
    n_passed: int = 0
    last_used: float = 0.0
    name: str | None = None

    @property
    def n_left(self) -> int:
        """Prompt tokens that prefill still has to compute; the last one belongs to decode."""
        return max(0, self.n_prompt - 1 - self.position)


class SchedulerState(Struct, frozen=True):
    """Everything the scheduler knows."""

    slots: tuple[Slot, ...]
    waiting: tuple[QueuedRequest, ...] = ()
    actions: tuple[SlotAction, ...] = ()

    def slot(self, slot: int) -> Slot:
        """The seat of this slot id."""
        return self.slots[slot]

    def find(self, request: str) -> Slot | None:
        """The seat in which this ask is being served, if any."""
        return next((s for s in self.slots if s.queued and s.queued.request == request), None)

    @property
    def active_bytes(self) -> int:
        """Live KV that the asks in the seats are expected to need."""
        return sum(s.queued.n_bytes for s in self.slots if s.queued and s.state in ACTIVE)

    @property
    def n_active(self) -> int:
        """How many seats prefill or decode."""
        return sum(slot.state in ACTIVE for slot in self.slots)


def idle_slots(state: SchedulerState) -> list[int]:
    """Slots that are idle but not empty, the longest unused first."""
    idle = [s for s in state.slots if s.state is SlotState.IDLE and s.n_tokens]
    return [seat.id for seat in sorted(idle, key=lambda slot: slot.last_used)]


def initial_state(n_slots: int) -> SchedulerState:
    """A desk of `n_slots` idle, empty seats."""
    return SchedulerState(slots=tuple(Slot(id=i) for i in range(n_slots)))


def enqueue(state: SchedulerState, ticket: QueuedRequest) -> SchedulerState:
    """The ticket joins the queue."""
    return msgspec.structs.replace(state, waiting=(*state.waiting, ticket))


def enqueue_action(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    """The errand joins the errands of its slot."""
    return msgspec.structs.replace(state, actions=(*state.actions, pending))


def drop_action(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    """The errand waits no longer."""
    rest = tuple(e for e in state.actions if e.id != pending.id)
    return msgspec.structs.replace(state, actions=rest)


def dequeue(state: SchedulerState, request: str) -> SchedulerState:
    """The ask waits no longer; unchanged if it did not wait."""
    return msgspec.structs.replace(
        state, waiting=tuple(t for t in state.waiting if t.request != request)
    )


def assign_slot(state: SchedulerState, ticket: QueuedRequest, slot: int) -> SchedulerState:
    """The ticket takes the idle seat and begins to prefill at position 0."""
    slot_state = state.slot(slot)
    assert slot_state.state is SlotState.IDLE, f"slot {slot} is {slot_state.state}, not idle"
    taken = msgspec.structs.replace(
        slot_state, state=SlotState.PREFILLING, queued=ticket, position=0, n_prompt=ticket.n_prompt
    )
    return dequeue(_with_slot(state, taken), ticket.request)


def start_loading(state: SchedulerState, slot: int) -> SchedulerState:
    """The prefilling seat waits for the disk; others get the bites meanwhile."""
    slot_state = state.slot(slot)
    assert slot_state.state is SlotState.PREFILLING, (
        f"slot {slot} is {slot_state.state}, not prefilling"
    )
    return _with_slot(state, msgspec.structs.replace(slot_state, state=SlotState.LOADING))


def finish_loading(state: SchedulerState, slot: int) -> SchedulerState:
    """What the seat waited for is there, or lost for good."""
    slot_state = state.slot(slot)
    assert slot_state.state is SlotState.LOADING, f"slot {slot} is {slot_state.state}, not loading"
    return _with_slot(state, msgspec.structs.replace(slot_state, state=SlotState.PREFILLING))


def advance(state: SchedulerState, slot: int, position: int) -> SchedulerState:
    """Prefill reached `position`; the seat runs once only the last prompt token is left."""
    slot_state = state.slot(slot)
    assert slot_state.state is SlotState.PREFILLING, (
        f"slot {slot} is {slot_state.state}, not prefilling"
    )
    moved = msgspec.structs.replace(slot_state, position=position)
    if moved.n_left == 0:
        moved = msgspec.structs.replace(moved, state=SlotState.RUNNING)
    return _with_slot(state, moved)


def skip(state: SchedulerState, slot: int) -> SchedulerState:
    """The bite of this turn goes to `slot`: everyone else who prefills was passed over again."""
    slots = tuple(
        msgspec.structs.replace(s, n_passed=0 if s.id == slot else s.n_passed + 1)
        if s.state is SlotState.PREFILLING
        else s
        for s in state.slots
    )
    return msgspec.structs.replace(state, slots=slots)


def reserve_slot(state: SchedulerState, pending: SlotAction) -> SchedulerState:
    """The errand starts in its idle seat."""
    slot = state.slot(pending.slot)
    assert slot.state is SlotState.IDLE, f"slot {pending.slot} is {slot.state}, not idle"
    held = msgspec.structs.replace(slot, state=SlotState.HELD)
    return _with_slot(drop_action(state, pending), held)


def release_slot(state: SchedulerState, slot: int, n_tokens: int, now: float) -> SchedulerState:
    """The seat is idle again, with `n_tokens` of what was said in it.

    Who only waited for the disk has not used it; how its context began is unknown now.
    """
    slot_state = state.slot(slot)
    if slot_state.state is SlotState.LOADING:
        before = Slot(slot, n_tokens=n_tokens, last_used=slot_state.last_used, name=slot_state.name)
        return _with_slot(state, before)
    n_prompt = min(slot_state.n_prompt, n_tokens)
    name = slot_state.queued.name if slot_state.queued else slot_state.name
    return _with_slot(
        state, Slot(slot, n_tokens=n_tokens, n_prompt=n_prompt, last_used=now, name=name)
    )


def reset_slot(state: SchedulerState, slot: int, n_tokens: int, now: float) -> SchedulerState:
    """The seat is idle again, with another context of `n_tokens`, unknown where it is from."""
    return _with_slot(state, Slot(slot, n_tokens=n_tokens, last_used=now))


def _with_slot(state: SchedulerState, slot: Slot) -> SchedulerState:
    slots = (*state.slots[: slot.id], slot, *state.slots[slot.id + 1 :])
    return msgspec.structs.replace(state, slots=slots)
