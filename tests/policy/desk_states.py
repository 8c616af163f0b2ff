"""Small words for tests of the desk."""

from typing import Any

from mlxstack.core.ask import Priority
from mlxstack.policy.desk import Desk, Ticket, advance, arrive, empty_desk, release, sit
from mlxstack.policy.scheduler import Action, Give, Limits, Run, decide

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def ticket(ask: str, arrived: float = 0.0, priority: Priority = NORMAL, **more: Any) -> Ticket:
    """A prompt of 100 tokens unless told otherwise."""
    return Ticket(ask, more.pop("n_prompt", 100), arrived, priority, **more)


def desk_of(n_slots: int, *waiting: Ticket) -> Desk:
    """Empty seats, and these tickets in the queue."""
    desk = empty_desk(n_slots)
    for one in waiting:
        desk = arrive(desk, one)
    return desk


def nothing(ask: str, slot: int) -> int:
    """No context shares anything with any ask."""
    return 0


def turn(desk: Desk, now: float = 0.0, limits: Limits | None = None) -> tuple[Desk, list[Action]]:
    """`decide` with cold caches."""
    return decide(desk, now, limits or Limits(), nothing)


def given(actions: list[Action]) -> list[tuple[str, int]]:
    """(ask, slot) of everyone who was seated, in order."""
    return [(a.ticket.ask, a.slot) for a in actions if isinstance(a, Give)]


def begun(actions: list[Action]) -> list[str]:
    """Ids of the errands that were begun."""
    return [a.errand.id for a in actions if isinstance(a, Run)]


def used(desk: Desk, slot: int, n_prompt: int, n_tokens: int, now: float = 0.0) -> Desk:
    """Somebody sat here and left a context of `n_tokens`."""
    desk = sit(desk, ticket(f"before-{slot}", n_prompt=n_prompt), slot)
    return release(advance(desk, slot, n_prompt - 1), slot, n_tokens, now)


def serve_one_by_one(desk: Desk, now: float = 0.0) -> list[str]:
    """The order in which a desk of one slot serves its queue."""
    order: list[str] = []
    while True:
        desk, actions = turn(desk, now)
        if not given(actions):
            return order
        ((ask, slot),) = given(actions)
        order.append(ask)
        desk = release(desk, slot, 100, now)
