"""Small words for tests of the desk."""

from typing import Any

from msgspec.structs import replace

from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Priority, Request
from mlxstack.policy.scheduling.scheduler import (
    Action,
    AssignSlot,
    Lookup,
    SchedulerLimits,
    schedule,
)
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    Slot,
    SlotAction,
    SlotState,
    advance,
    assign_slot,
    enqueue,
    initial_state,
    release_slot,
)
from tests.callers import with_caller

HIGH = Priority.HIGH
NORMAL = Priority.NORMAL
LOW = Priority.LOW
NOTHING = Lookup()
"""No context and no prefill shares anything with any request."""


def ticket(
    ask: str,
    arrived: float = 0.0,
    priority: Priority = NORMAL,
    *,
    n_prompt: int = 100,
    pin: int | None = None,
    name: str | None = None,
    **more: Any,
) -> Request:
    """A prompt of 100 tokens unless told otherwise."""
    return Request(
        ask,
        PromptTokens((0,) * n_prompt),
        max_tokens=1,
        slot=pin,
        display_name=name,
        arrived=arrived,
        **with_caller({"priority": priority, **more}),
    )


def desk_of(n_slots: int, *waiting: Request) -> SchedulerState:
    """Empty seats, and these tickets in the queue."""
    desk = initial_state(n_slots)
    for one in waiting:
        desk = enqueue(desk, one)
    return desk


def turn(
    desk: SchedulerState, now: float = 0.0, limits: SchedulerLimits | None = None
) -> tuple[SchedulerState, list[Action]]:
    """`decide` with cold caches."""
    return schedule(desk, now, limits or SchedulerLimits(), NOTHING)


def given(actions: list[Action]) -> list[tuple[str, int]]:
    """(ask, slot) of everyone who was seated, in order."""
    return [(a.request.id, a.slot) for a in actions if isinstance(a, AssignSlot)]


def begun(actions: list[Action]) -> list[str]:
    """Ids of the errands that were begun."""
    return [a.id for a in actions if isinstance(a, SlotAction)]


def used(
    desk: SchedulerState,
    slot: int,
    n_prompt: int,
    n_tokens: int,
    now: float = 0.0,
    name: str | None = None,
) -> SchedulerState:
    """A request of conversation `name` was served here and left a context of `n_tokens`."""
    desk = assign_slot(desk, ticket(f"before-{slot}", n_prompt=n_prompt, name=name), slot)
    return release_slot(advance(desk, slot, n_prompt - 1), slot, n_tokens, now)


def serve_one_by_one(desk: SchedulerState, now: float = 0.0) -> list[str]:
    """The order in which a desk of one slot serves its queue."""
    order: list[str] = []
    while True:
        desk, actions = turn(desk, now)
        if not given(actions):
            return order
        ((ask, slot),) = given(actions)
        order.append(ask)
        desk = release_slot(desk, slot, 100, now)


def is_agents_turn(desk: SchedulerState, ticket: Request) -> bool:
    """No other ask of this explicit agent is being served or came earlier."""
    if ticket.agent is None:
        return True
    seated = [s.request for s in desk.slots if s.request]
    mine = [t for t in desk.waiting if t.agent == ticket.agent]
    is_first = min(mine, key=lambda t: t.arrived) == ticket
    return is_first and all(t.agent != ticket.agent for t in seated)


def open_seats(desk: SchedulerState, ticket: Request) -> set[int]:
    """Idle seats that this ticket may take: its pin, and none with an older errand."""
    barred = {e.slot for e in desk.actions if e.arrived < ticket.arrived}
    idle = {s.id for s in desk.slots if s.state is SlotState.IDLE} - barred
    return idle if ticket.slot is None else idle & {ticket.slot}


def heads_for(desk: SchedulerState, ticket: Request, lookup: Lookup) -> list[Slot]:
    """Seats that have yet to compute or to load what this ticket needs too."""
    busy = [s for s in desk.slots if s.state in (SlotState.LOADING, SlotState.PREFILLING)]
    return [
        s for s in busy if s.request and lookup.shared_prefill(ticket.id, s.request.id) > s.position
    ]


def put(desk: SchedulerState, seat: Slot) -> SchedulerState:
    """The desk with this seat in place of the one of its id."""
    seats = tuple(seat if s.id == seat.id else s for s in desk.slots)
    return replace(desk, slots=seats)
