"""Who goes next."""

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlxstack.core.request import Priority
from mlxstack.policy.scheduling.scheduler import (
    effective_priority,
    expired,
    retry_after,
    schedulable,
    sort_queue,
)
from mlxstack.policy.scheduling.scheduler_state import assign_slot, release_slot
from tests.policy.scheduler_states import HIGH, LOW, NORMAL, desk_of, serve_one_by_one, ticket


def test_e6_priorities_go_first() -> None:
    desk = desk_of(1, ticket("L", 0, LOW), ticket("N", 0, NORMAL), ticket("H", 0, HIGH))
    assert serve_one_by_one(desk) == ["H", "N", "L"]


@pytest.mark.parametrize(
    ("now", "newcomer", "first"),
    [(9.9, NORMAL, "new"), (10.1, NORMAL, "old"), (19.9, HIGH, "new"), (20.1, HIGH, "old")],
)
def test_e7_low_equals_normal_after_10_s_and_high_after_20(
    now: float, newcomer: Priority, first: str
) -> None:
    old = ticket("old", 0.0, LOW)
    new = ticket("new", now, newcomer)
    assert sort_queue([new, old], now, 0.1)[0].id == first


@pytest.mark.parametrize(("now", "newcomer"), [(10.0, NORMAL), (20.0, HIGH)])
def test_e7_exactly_equal_goes_by_arrival(now: float, newcomer: Priority) -> None:
    old = ticket("old", 0.0, LOW)
    new = ticket("new", now, newcomer)
    assert effective_priority(old, now, 0.1) == effective_priority(new, now, 0.1)
    assert [t.id for t in sort_queue([new, old], now, 0.1)] == ["old", "new"]


def test_e7_without_aging_low_stays_low() -> None:
    old = ticket("old", 0.0, LOW)
    new = ticket("new", 1e6, HIGH)
    assert [t.id for t in sort_queue([old, new], 1e6, 0.0)] == ["new", "old"]


def test_e7_an_arrival_from_the_future_has_not_waited() -> None:
    assert effective_priority(ticket("a", 5.0), now=3.0, aging_per_s=0.1) == NORMAL


@examples(
    st.lists(st.floats(0, 1e6), min_size=2, max_size=8),
    st.floats(0, 1),
    st.sampled_from(Priority),
    st.floats(0, 1e6),
)
def test_e8_first_come_first_served_inside_a_priority(
    arrivals: list[float], aging: float, priority: Priority, later: float
) -> None:
    tickets = [ticket(str(n), at, priority) for n, at in enumerate(arrivals)]
    served = sort_queue(tickets, max(arrivals) + later, aging)
    assert [t.arrived for t in served] == sorted(arrivals)


def test_e8_five_in_order() -> None:
    desk = desk_of(1, *(ticket(str(n), n) for n in range(5)))
    assert serve_one_by_one(desk, now=9.0) == list("01234")


def test_e12_one_agent_goes_by_arrival_whatever_the_priority_and_the_queue() -> None:
    second = ticket("second", 2.0, HIGH, agent="a")
    desk = desk_of(3, second, ticket("first", 1.0, LOW, agent="a"))
    assert [t.id for t in schedulable(desk, 3.0, 0.1)] == ["first"]


def test_e12_nobody_is_ready_while_their_agent_is_served() -> None:
    desk = desk_of(3, ticket("next", 1.0, agent="a"), ticket("other", 2.0, agent="b"))
    desk = assign_slot(desk, ticket("now", 0.0, agent="a"), 0)
    assert [t.id for t in schedulable(desk, 3.0, 0.1)] == ["other"]
    assert [t.id for t in schedulable(release_slot(desk, 0, 9, 3.0), 3.0, 0.1)] == ["next", "other"]


def test_e13_asks_without_an_agent_go_beside_each_other() -> None:
    desk = desk_of(3, ticket("a", 1.0), ticket("b", 2.0))
    assert [t.id for t in schedulable(desk, 3.0, 0.1)] == ["a", "b"]


def test_e11_the_deadline_counts_waiting_and_seated() -> None:
    desk = desk_of(1, ticket("w", deadline=5.0), ticket("forever"))
    desk = assign_slot(desk, ticket("s", deadline=6.0), 0)
    assert [[t.id for t in expired(desk, now)] for now in (4.9, 5.0, 6.0)] == [
        [],
        ["w"],
        ["w", "s"],
    ]


def test_e18_retry_after_grows_with_the_queue_and_is_never_below_a_second() -> None:
    queue = [ticket(str(n)) for n in range(7)]
    assert retry_after(desk_of(2), 0.1) == 1.0
    assert retry_after(desk_of(2, *queue), 3.0) == 8 * 3.0 / 2
