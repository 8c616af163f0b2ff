"""The scheduler in scenes that a person can follow; its histories are in test_scheduler_machine."""

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlxstack.core.request import Request
from mlxstack.policy.scheduling.chunked_prefill import ThroughputModel
from mlxstack.policy.scheduling.scheduler import (
    Expire,
    Lookup,
    PrefillChunk,
    SchedulerLimits,
    is_full,
    next_prefill_chunk,
    schedule,
)
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    SlotAction,
    SlotState,
    advance,
    assign_slot,
    enqueue,
    enqueue_action,
    finish_loading,
    release_slot,
    start_loading,
)
from tests.policy.scheduler_states import (
    HIGH,
    LOW,
    NORMAL,
    NOTHING,
    begun,
    desk_of,
    given,
    ticket,
    turn,
    used,
)


def test_e1_the_fourth_starts_when_the_first_of_three_ends() -> None:
    desk, actions = turn(desk_of(3, *(ticket(str(n), n) for n in range(4))), 5.0)
    assert given(actions) == [("0", 0), ("1", 1), ("2", 2)]
    desk, actions = turn(release_slot(desk, 1, 100, 6.0), 6.0)
    assert given(actions) == [("3", 1)]


def test_e4_never_more_than_max_active() -> None:
    desk, _ = turn(desk_of(10, *(ticket(str(n), n) for n in range(10))))
    assert (desk.n_active, len(desk.waiting)) == (8, 2)


def test_e4_held_seats_take_no_row_of_the_batch() -> None:
    desk = enqueue_action(
        desk_of(3, ticket("a"), ticket("b"), ticket("c")), SlotAction("save", 0, -1.0)
    )
    desk, actions = turn(desk, limits=SchedulerLimits(max_active=2))
    assert begun(actions) == ["save"]
    assert given(actions) == [("a", 1), ("b", 2)]


def test_b6_two_pinned_to_one_slot_go_one_after_the_other() -> None:
    desk, actions = turn(desk_of(3, ticket("a", 1, pin=0), ticket("b", 2, pin=0)))
    assert given(actions) == [("a", 0)]
    desk, actions = turn(release_slot(desk, 0, 100, 3.0))
    assert given(actions) == [("b", 0)]


def test_b6_a_pinned_ask_that_waits_does_not_stop_the_others() -> None:
    desk, _ = turn(desk_of(2, ticket("a", 0, pin=0)))
    desk = enqueue(enqueue(desk, ticket("b", 1, HIGH, pin=0)), ticket("c", 2, LOW))
    assert given(turn(desk)[1]) == [("c", 1)]


def test_b6_pinned_and_unpinned_share_the_slots_so_that_both_are_served() -> None:
    _, actions = turn(desk_of(2, ticket("any", 1), ticket("pinned", 2, pin=0)))
    assert given(actions) == [("any", 1), ("pinned", 0)]


def test_b7_four_on_three_slots_in_order_of_arrival() -> None:
    desk, actions = turn(desk_of(3, *(ticket(str(n), n) for n in range(4))))
    assert [ask for ask, _ in given(actions)] == ["0", "1", "2"]
    assert [t.id for t in desk.waiting] == ["3"]


def test_e12_an_agents_second_ask_waits_for_its_first() -> None:
    asks = (ticket("a1", 1, agent="a"), ticket("a2", 2, HIGH, agent="a"), ticket("b", 3, agent="b"))
    desk, actions = turn(desk_of(3, *asks))
    assert given(actions) == [("a1", 0), ("b", 1)]
    desk, actions = turn(release_slot(desk, 0, 100, 4.0))
    assert [ask for ask, _ in given(actions)] == ["a2"]


def test_e11_a_late_ask_leaves_the_queue() -> None:
    late = ticket("late", deadline=5.0)
    desk = desk_of(1, ticket("a"), late)
    desk, actions = turn(desk, 4.9)
    assert given(actions) == [("a", 0)]
    desk, actions = turn(desk, 5.0)
    assert actions == [Expire(late)]
    assert not desk.waiting


def test_e11_a_late_ask_in_a_seat_is_named_until_its_seat_is_released() -> None:
    late = ticket("late", deadline=5.0)
    desk, _ = turn(desk_of(1, late))
    desk, actions = turn(desk, 5.0)
    assert actions == [Expire(late)]
    assert turn(release_slot(desk, 0, 0, 5.0), 5.1)[1] == []


def test_b18_a_request_waits_until_its_kv_fits_beside_that_of_others() -> None:
    limits = SchedulerLimits(max_bytes=250)
    asks = ticket("0", 0), ticket("1", 1), ticket("2", 2), ticket("small", 3, n_prompt=10)

    def need(request: Request) -> int:
        return len(request.tokens)

    desk, actions = schedule(desk_of(4, *asks), 5.0, limits, Lookup(kv_bytes=need))
    assert given(actions) == [("0", 0), ("1", 1)], "a small one overtook"
    desk = release_slot(desk, 0, 100, 6.0)
    assert given(schedule(desk, 6.0, limits, Lookup(kv_bytes=need))[1]) == [("2", 2), ("small", 3)]
    huge = desk_of(1, ticket("huge", n_prompt=1000))
    assert given(schedule(huge, 5.0, limits, Lookup(kv_bytes=need))[1]) == [("huge", 0)]


def test_errands_of_a_busy_slot_wait_and_then_go_before_later_asks() -> None:
    desk, _ = turn(desk_of(1, ticket("a", 0)))
    desk = enqueue_action(enqueue(desk, ticket("b", 2, HIGH, pin=0)), SlotAction("save", 0, 1.0))
    desk, actions = turn(desk, 3.0)
    assert actions == []
    desk, actions = turn(release_slot(desk, 0, 100, 4.0), 4.0)
    assert (begun(actions), given(actions)) == (["save"], [])
    desk, actions = turn(release_slot(desk, 0, 100, 5.0), 5.0)
    assert given(actions) == [("b", 0)]


def test_errands_let_earlier_pinned_asks_go_first() -> None:
    desk = enqueue_action(desk_of(1, ticket("a", 1, pin=0)), SlotAction("save", 0, 2.0))
    desk, actions = turn(desk, 3.0)
    assert (begun(actions), given(actions)) == ([], [("a", 0)])
    assert begun(turn(release_slot(desk, 0, 100, 4.0), 4.0)[1]) == ["save"]


def test_errands_of_one_slot_keep_their_order() -> None:
    desk = enqueue_action(
        enqueue_action(desk_of(1), SlotAction("one", 0, 1.0)), SlotAction("two", 0, 1.0)
    )
    desk, actions = turn(desk, 2.0)
    assert begun(actions) == ["one"]
    assert begun(turn(release_slot(desk, 0, 0, 3.0), 3.0)[1]) == ["two"]


def test_errands_are_not_starved_by_an_endless_stream_of_pinned_asks() -> None:
    desk, _ = turn(desk_of(1, ticket("0", 0, HIGH, pin=0)))
    desk = enqueue_action(desk, SlotAction("save", 0, 0.5))
    for n in range(1, 4):
        desk = enqueue(desk, ticket(str(n), n, HIGH, pin=0))
    desk, actions = turn(release_slot(desk, 0, 100, 4.0), 4.0)
    assert begun(actions) == ["save"]


def test_errands_are_not_passed_by_a_more_urgent_pinned_ask() -> None:
    asks = (ticket("early", 1, LOW, pin=0), ticket("late", 3, HIGH, pin=0))
    _, actions = turn(enqueue_action(desk_of(1, *asks), SlotAction("save", 0, 2.0)), 4.0)
    assert (begun(actions), given(actions)) == ([], [("early", 0)])


def test_a_slot_with_an_errand_is_not_given_to_later_asks() -> None:
    desk, _ = turn(desk_of(2, ticket("a1", 0, agent="a")))
    desk = enqueue_action(
        enqueue(desk, ticket("a2", 1, agent="a", pin=1)), SlotAction("save", 1, 2.0)
    )
    desk, actions = turn(enqueue(desk, ticket("b", 3)), 4.0)
    assert actions == [], "a2 waits for a1, the errand for a2, and b for either slot"
    assert given(turn(release_slot(desk, 0, 100, 5.0), 5.0)[1]) == [("a2", 1), ("b", 0)]


def test_queue_order_of_an_agent_cannot_lock_a_slot_with_an_errand() -> None:
    """The later ask of the agent reached the queue first, with an errand's time between them."""
    late = ticket("late", 6, agent="a", pin=0)
    early = ticket("early", 3, agent="a", pin=0)
    desk = enqueue_action(desk_of(1, late, early), SlotAction("save", 0, 5.0))
    desk, actions = turn(desk, 7.0)
    assert given(actions) == [("early", 0)]


def test_e18_a_full_queue_is_full_exactly_at_its_bound() -> None:
    desk = desk_of(1, ticket("seated"))
    limits = SchedulerLimits(max_waiting=2)
    for n, expected in enumerate([False, False, True]):
        newcomer = ticket(str(n), n)
        assert is_full(desk, newcomer, 9.0, limits, NOTHING) is expected
        desk = enqueue(desk, newcomer)


@pytest.mark.parametrize(
    ("newcomer", "expected"), [(ticket("p", 9, pin=0), True), (ticket("u", 9), False)]
)
def test_e18_idle_slots_do_not_make_room_for_those_who_wait_for_another(
    newcomer: Request, expected: bool
) -> None:
    desk, _ = turn(desk_of(3, ticket("a", pin=0)))
    desk = enqueue(desk, ticket("b", 1, pin=0))
    assert is_full(desk, newcomer, 9.0, SchedulerLimits(max_waiting=1), NOTHING) is expected


def test_e18_without_a_queue_only_what_can_start_is_taken() -> None:
    limits = SchedulerLimits(max_waiting=0)
    assert not is_full(desk_of(1), ticket("a"), 0.0, limits, NOTHING)
    desk, _ = turn(desk_of(1, ticket("a")))
    assert is_full(desk, ticket("b"), 0.0, limits, NOTHING)


tickets = st.builds(
    lambda n, at, priority, pin, agent: ticket(str(n), at, priority, pin=pin, agent=agent),
    st.uuids(),
    st.floats(0, 30),
    st.sampled_from((HIGH, NORMAL, LOW)),
    st.none() | st.integers(0, 2),
    st.none() | st.sampled_from("ab"),
)


@examples(st.lists(tickets, max_size=12), st.integers(0, 4), st.integers(1, 4))
def test_e18_what_is_admitted_never_makes_more_than_max_waiting_wait(
    newcomers: list[Request], max_waiting: int, max_active: int
) -> None:
    limits = SchedulerLimits(max_waiting=max_waiting, max_active=max_active)
    desk = desk_of(3)
    for one in newcomers:
        n_would_wait = len(turn(enqueue(desk, one), 30.0, limits)[0].waiting)
        assert is_full(desk, one, 30.0, limits, NOTHING) is (n_would_wait > max_waiting)
        if n_would_wait <= max_waiting:
            desk = enqueue(desk, one)
            if one.slot is None:  # a turn between some arrivals, several arrivals between others
                desk, _ = turn(desk, 30.0, limits)
                assert len(desk.waiting) <= max_waiting


def test_e7_low_under_an_endless_stream_of_high_waits_20_s() -> None:
    """One slot, each answer takes a second, two more HIGH asks arrive every second."""
    desk = desk_of(1, ticket("low", 0.5, LOW))
    for second in range(60):
        for n in range(2):
            desk = enqueue(desk, ticket(f"{second}.{n}", float(second), HIGH))
        desk, actions = turn(desk, float(second))
        ((ask, slot),) = given(actions)
        if ask == "low":
            break
        desk = release_slot(desk, slot, 100, second + 1.0)
    # At 20.5 s nobody who arrived later goes before it; some 20 who came earlier still do.
    assert 20 <= second <= 42


def test_b6_the_seat_of_a_pinned_ask_is_not_lost_to_urgent_ones() -> None:
    desk, _ = turn(used(desk_of(2, ticket("x", 0, pin=0)), 1, 50, 60), 0.0)
    desk = enqueue(desk, ticket("pinned", 1.0, NORMAL, pin=0))
    desk = enqueue(desk, ticket("later", 2.0, NORMAL))
    desk, actions = turn(release_slot(desk, 0, 10, 3.0), 3.0)
    assert set(given(actions)) == {("pinned", 0), ("later", 1)}


def test_e14_nobody_to_prefill_means_no_bite() -> None:
    desk = desk_of(2)
    assert next_prefill_chunk(desk, ThroughputModel(), SchedulerLimits().prefill) == (desk, None)


def test_z7_a_short_prompt_passes_a_long_one_that_began() -> None:
    desk = desk_of(2, ticket("long", 0, n_prompt=4001), ticket("short", 1, n_prompt=51))
    desk, _ = turn(desk)
    desk = advance(desk, 0, 2944)
    desk, bite = next_prefill_chunk(
        desk, ThroughputModel(prefill_tps=1000.0), SchedulerLimits().prefill
    )
    assert bite == PrefillChunk(slot=1, n_tokens=50)
    assert (desk.slot(0).n_passed, desk.slot(1).n_passed) == (1, 0)


def test_e6_a_more_urgent_prompt_is_computed_first_even_if_it_is_longer() -> None:
    short = ticket("short", 0, n_prompt=300)
    urgent = ticket("urgent", 1, HIGH, n_prompt=4001)
    desk, _ = turn(desk_of(2, short, urgent))
    order = []
    for _ in range(4):
        desk, bite = next_prefill_chunk(
            desk, ThroughputModel(prefill_tps=100.0), SchedulerLimits().prefill
        )
        assert bite is not None
        order.append(bite.slot)
    # The one that came first still gets every fourth bite.
    at = next(seat.id for seat in desk.slots if seat.request == urgent)
    assert order == [at, at, at, 1 - at]


def test_e10_illegal_transitions_raise() -> None:
    desk, _ = turn(desk_of(2, ticket("a", n_prompt=10)))
    with pytest.raises(AssertionError, match="not idle"):
        assign_slot(desk, ticket("b"), 0)
    with pytest.raises(AssertionError, match="not prefilling"):
        advance(desk, 1, 5)
    with pytest.raises(AssertionError, match="not loading"):
        finish_loading(desk, 0)
    desk = advance(desk, 0, 9)
    assert desk.slot(0).state is SlotState.RUNNING
    with pytest.raises(AssertionError, match="not prefilling"):
        advance(desk, 0, 10)
    with pytest.raises(AssertionError, match="not prefilling"):
        start_loading(desk, 0)


def test_e1_the_last_prompt_token_belongs_to_decode() -> None:
    desk, _ = turn(desk_of(1, ticket("a", n_prompt=10)))
    assert advance(desk, 0, 8).slot(0).state is SlotState.PREFILLING
    assert advance(desk, 0, 9).slot(0).state is SlotState.RUNNING


def test_deciding_is_a_function_of_its_arguments() -> None:
    desk: SchedulerState = desk_of(2, ticket("a"), ticket("b", 1), ticket("c", 2))
    assert schedule(desk, 3.0, SchedulerLimits(), NOTHING) == schedule(
        desk, 3.0, SchedulerLimits(), NOTHING
    )


def head_of(n: int) -> Lookup:
    """Everybody's prompt begins with the same `n` tokens."""
    return Lookup(shared_prefill=lambda ask, other: n)


def test_z5_a_team_lets_one_compute_the_shared_head_and_then_forks_it() -> None:
    desk = desk_of(3, *(ticket(str(n), n, n_prompt=3000) for n in range(3)))
    desk, actions = schedule(desk, 5.0, SchedulerLimits(), head_of(2048))
    assert given(actions) == [("0", 0)]
    desk, actions = schedule(advance(desk, 0, 2047), 6.0, SchedulerLimits(), head_of(2048))
    assert given(actions) == []
    desk, actions = schedule(advance(desk, 0, 2048), 7.0, SchedulerLimits(), head_of(2048))
    assert given(actions)[0] == ("1", 1), "the second begins at the head's end by forking"


def test_z5_strangers_do_not_wait_for_the_team() -> None:
    desk, _ = turn(desk_of(2, ticket("team", 0, n_prompt=3000)))
    desk = enqueue(desk, ticket("stranger", 1))
    assert given(schedule(desk, 2.0, SchedulerLimits(), head_of(0))[1]) == [("stranger", 1)]


def test_z5_a_head_that_is_read_from_disk_is_waited_for() -> None:
    desk, _ = turn(desk_of(2, ticket("0", 0, n_prompt=3000)))
    desk = enqueue(start_loading(desk, 0), ticket("1", 1, n_prompt=3000))
    assert schedule(desk, 2.0, SchedulerLimits(), head_of(2048))[1] == []
    desk = advance(finish_loading(desk, 0), 0, 2048)
    assert given(schedule(desk, 3.0, SchedulerLimits(), head_of(2048))[1]) == [("1", 1)]


def test_a_seat_that_loads_holds_its_row_and_gets_no_bites() -> None:
    desk, _ = turn(desk_of(2, ticket("a"), ticket("b", 1)), limits=SchedulerLimits(max_active=1))
    desk = start_loading(desk, 0)
    assert desk.n_active == 1
    assert next_prefill_chunk(desk, ThroughputModel(), SchedulerLimits().prefill) == (desk, None)
