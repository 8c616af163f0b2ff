"""The desk: who sits in which slot, who waits, and how each of these changes. All values."""

from enum import StrEnum

import msgspec
from msgspec import Struct

from mlxstack.core.ask import Priority


class SeatState(StrEnum):
    """What happens in a slot.

    LOADING: KV for its prompt is read from disk. HELD: a save, restore or erase is at work.
    """

    IDLE = "idle"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    HELD = "held"


ACTIVE = frozenset((SeatState.LOADING, SeatState.PREFILLING, SeatState.RUNNING))


class Ticket(Struct, frozen=True):
    """An ask that waits. `pin` is the slot it insists on; `agent` an explicit agent.

    `name` is what people see of it. `n_bytes` of live KV is what it is expected to need.
    """

    ask: str
    n_prompt: int
    arrived: float
    priority: Priority = Priority.NORMAL
    pin: int | None = None
    agent: str | None = None
    deadline: float | None = None
    n_bytes: int = 0
    name: str | None = None


class Errand(Struct, frozen=True):
    """A slot action that waits until its slot is idle."""

    id: str
    slot: int
    arrived: float


class Seat(Struct, frozen=True):
    """A slot. `position` of `n_prompt` tokens are prefilled; `n_tokens` is the idle context.

    An idle seat remembers `n_prompt`: how many of its tokens were the last prompt, 0 if unknown,
    and `name`: the agent or conversation whose context it holds, None if unknown.
    `n_passed` counts the bites that others got since this seat sat down or got its last one.
    """

    id: int
    state: SeatState = SeatState.IDLE
    ticket: Ticket | None = None
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


class Desk(Struct, frozen=True):
    """Everything the scheduler knows."""

    seats: tuple[Seat, ...]
    waiting: tuple[Ticket, ...] = ()
    errands: tuple[Errand, ...] = ()

    def seat(self, slot: int) -> Seat:
        """The seat of this slot id."""
        return self.seats[slot]

    def find(self, ask: str) -> Seat | None:
        """The seat in which this ask is being served, if any."""
        return next((s for s in self.seats if s.ticket and s.ticket.ask == ask), None)

    @property
    def active_bytes(self) -> int:
        """Live KV that the asks in the seats are expected to need."""
        return sum(s.ticket.n_bytes for s in self.seats if s.ticket and s.state in ACTIVE)

    @property
    def n_active(self) -> int:
        """How many seats prefill or decode."""
        return sum(seat.state in ACTIVE for seat in self.seats)


def idle_slots(desk: Desk) -> list[int]:
    """Slots that are idle but not empty, the longest unused first."""
    idle = [s for s in desk.seats if s.state is SeatState.IDLE and s.n_tokens]
    return [seat.id for seat in sorted(idle, key=lambda seat: seat.last_used)]


def empty_desk(n_slots: int) -> Desk:
    """A desk of `n_slots` idle, empty seats."""
    return Desk(seats=tuple(Seat(id=i) for i in range(n_slots)))


def arrive(desk: Desk, ticket: Ticket) -> Desk:
    """The ticket joins the queue."""
    return msgspec.structs.replace(desk, waiting=(*desk.waiting, ticket))


def request(desk: Desk, errand: Errand) -> Desk:
    """The errand joins the errands of its slot."""
    return msgspec.structs.replace(desk, errands=(*desk.errands, errand))


def dismiss(desk: Desk, errand: Errand) -> Desk:
    """The errand waits no longer."""
    rest = tuple(e for e in desk.errands if e.id != errand.id)
    return msgspec.structs.replace(desk, errands=rest)


def leave_queue(desk: Desk, ask: str) -> Desk:
    """The ask waits no longer; unchanged if it did not wait."""
    return msgspec.structs.replace(desk, waiting=tuple(t for t in desk.waiting if t.ask != ask))


def sit(desk: Desk, ticket: Ticket, slot: int) -> Desk:
    """The ticket takes the idle seat and begins to prefill at position 0."""
    seat = desk.seat(slot)
    assert seat.state is SeatState.IDLE, f"slot {slot} is {seat.state}, not idle"
    taken = msgspec.structs.replace(
        seat, state=SeatState.PREFILLING, ticket=ticket, position=0, n_prompt=ticket.n_prompt
    )
    return leave_queue(_with_seat(desk, taken), ticket.ask)


def load(desk: Desk, slot: int) -> Desk:
    """The prefilling seat waits for the disk; others get the bites meanwhile."""
    seat = desk.seat(slot)
    assert seat.state is SeatState.PREFILLING, f"slot {slot} is {seat.state}, not prefilling"
    return _with_seat(desk, msgspec.structs.replace(seat, state=SeatState.LOADING))


def loaded(desk: Desk, slot: int) -> Desk:
    """What the seat waited for is there, or lost for good."""
    seat = desk.seat(slot)
    assert seat.state is SeatState.LOADING, f"slot {slot} is {seat.state}, not loading"
    return _with_seat(desk, msgspec.structs.replace(seat, state=SeatState.PREFILLING))


def advance(desk: Desk, slot: int, position: int) -> Desk:
    """Prefill reached `position`; the seat runs once only the last prompt token is left."""
    seat = desk.seat(slot)
    assert seat.state is SeatState.PREFILLING, f"slot {slot} is {seat.state}, not prefilling"
    moved = msgspec.structs.replace(seat, position=position)
    if moved.n_left == 0:
        moved = msgspec.structs.replace(moved, state=SeatState.RUNNING)
    return _with_seat(desk, moved)


def pass_over(desk: Desk, slot: int) -> Desk:
    """The bite of this turn goes to `slot`: everyone else who prefills was passed over again."""
    seats = tuple(
        msgspec.structs.replace(s, n_passed=0 if s.id == slot else s.n_passed + 1)
        if s.state is SeatState.PREFILLING
        else s
        for s in desk.seats
    )
    return msgspec.structs.replace(desk, seats=seats)


def hold(desk: Desk, errand: Errand) -> Desk:
    """The errand starts in its idle seat."""
    seat = desk.seat(errand.slot)
    assert seat.state is SeatState.IDLE, f"slot {errand.slot} is {seat.state}, not idle"
    held = msgspec.structs.replace(seat, state=SeatState.HELD)
    return _with_seat(dismiss(desk, errand), held)


def release(desk: Desk, slot: int, n_tokens: int, now: float) -> Desk:
    """The seat is idle again, with `n_tokens` of what was said in it.

    Who only waited for the disk has not used it; how its context began is unknown now.
    """
    seat = desk.seat(slot)
    if seat.state is SeatState.LOADING:
        before = Seat(slot, n_tokens=n_tokens, last_used=seat.last_used, name=seat.name)
        return _with_seat(desk, before)
    n_prompt = min(seat.n_prompt, n_tokens)
    name = seat.ticket.name if seat.ticket else seat.name
    return _with_seat(
        desk, Seat(slot, n_tokens=n_tokens, n_prompt=n_prompt, last_used=now, name=name)
    )


def renew(desk: Desk, slot: int, n_tokens: int, now: float) -> Desk:
    """The seat is idle again, with another context of `n_tokens`, unknown where it is from."""
    return _with_seat(desk, Seat(slot, n_tokens=n_tokens, last_used=now))


def _with_seat(desk: Desk, seat: Seat) -> Desk:
    seats = (*desk.seats[: seat.id], seat, *desk.seats[seat.id + 1 :])
    return msgspec.structs.replace(desk, seats=seats)
