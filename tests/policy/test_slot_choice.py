"""Which slot an ask gets."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.scheduling.scheduler import SLACK, Lookup, select_slot
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    SlotAction,
    advance,
    assign_slot,
    enqueue,
    enqueue_action,
    release_slot,
    reserve_slot,
    reset_slot,
    start_loading,
)
from tests.policy.scheduler_states import NOTHING, desk_of, ticket, used

NONE: frozenset[int] = frozenset()


def shares(**by_slot: int) -> Lookup:
    """`s0=90`: 90 tokens of slot 0's context begin the prompt."""
    return Lookup(lambda ask, slot: by_slot.get(f"s{slot}", 0))


def test_b5_a_follow_up_gets_its_own_seat_even_if_others_are_empty() -> None:
    desk = used(desk_of(3), 1, n_prompt=200, n_tokens=250)
    assert select_slot(desk, ticket("a"), shares(s1=250), NONE) == 1


def test_b5_a_follow_up_without_the_last_thoughts_is_still_one() -> None:
    desk = used(desk_of(3), 1, n_prompt=200, n_tokens=5000, name="chat-1")
    assert select_slot(desk, ticket("a", name="chat-1"), shares(s1=196), NONE) == 1


def test_b5_the_longest_shared_prefix_wins() -> None:
    desk = used(used(desk_of(3), 0, 100, 110), 2, 200, 210)
    assert select_slot(desk, ticket("a"), shares(s0=100, s2=200), NONE) == 2


def test_b5_equal_prefixes_go_to_the_one_used_last() -> None:
    desk = used(used(desk_of(2), 0, 100, 110, now=9.0), 1, 100, 110, now=5.0)
    assert select_slot(desk, ticket("a"), shares(s0=100, s1=100), NONE) == 0


def test_b5_a_new_conversation_with_the_same_head_takes_an_empty_seat() -> None:
    desk = used(desk_of(2), 0, n_prompt=22_000, n_tokens=23_000)
    assert select_slot(desk, ticket("b"), shares(s0=20_000), NONE) == 1


def test_b5_with_no_empty_seat_it_takes_the_one_that_shares_most_of_its_context() -> None:
    desk = used(used(desk_of(2), 0, 22_000, 23_000, now=9.0), 1, 100_000, 110_000, now=1.0)
    assert select_slot(desk, ticket("b"), shares(s0=20_000, s1=20_000), NONE) == 0


def test_x31_a_title_request_spares_the_long_conversation() -> None:
    desk = used(used(desk_of(2), 0, 90_000, 99_000, now=9.0), 1, 500, 600, now=1.0)
    assert select_slot(desk, ticket("title"), shares(s0=20_000), NONE) == 1


def test_b5_an_empty_seat_before_a_used_one_then_the_least_recently_used() -> None:
    desk = used(used(desk_of(3), 0, 50, 60, now=1.0), 2, 50, 60, now=2.0)
    assert select_slot(desk, ticket("a"), NOTHING, NONE) == 1
    desk = used(desk, 1, 50, 60, now=3.0)
    assert select_slot(desk, ticket("a"), NOTHING, NONE) == 0


def test_b5_a_restored_context_is_continued_by_what_repeats_it_all() -> None:
    desk = used(desk_of(2), 0, n_prompt=40, n_tokens=60)
    desk = reserve_slot(
        enqueue_action(desk, SlotAction("restore", 0, 1.0)), SlotAction("restore", 0, 1.0)
    )
    desk = reset_slot(desk, 0, n_tokens=5000, now=2.0)
    assert select_slot(desk, ticket("other"), shares(s0=40), NONE) == 1
    assert select_slot(desk, ticket("own"), shares(s0=5000), NONE) == 0


def test_b5_a_cancelled_prefill_is_continued_from_where_it_stood() -> None:
    desk = advance(assign_slot(desk_of(2), ticket("a", n_prompt=4000), 0), 0, 1024)
    desk = release_slot(desk, 0, n_tokens=1024, now=1.0)
    assert select_slot(desk, ticket("again", n_prompt=4000), shares(s0=1024), NONE) == 0


def test_b6_a_pin_waits_for_its_slot() -> None:
    desk = assign_slot(desk_of(3), ticket("a"), 0)
    assert select_slot(desk, ticket("b", pin=0), shares(s1=99), NONE) is None
    assert select_slot(release_slot(desk, 0, 10, 1.0), ticket("b", pin=0), NOTHING, NONE) == 0


def test_b6_others_leave_a_slot_to_those_who_insist_on_it() -> None:
    desk = enqueue(desk_of(2), ticket("pinned", pin=0))
    assert select_slot(desk, ticket("anywhere"), NOTHING, NONE) == 1
    desk = used(desk, 1, 50, 60)
    assert select_slot(desk, ticket("anywhere"), NOTHING, NONE) == 1
    assert select_slot(assign_slot(desk, ticket("x"), 1), ticket("anywhere"), NOTHING, NONE) == 0


def test_barred_slots_are_not_given_away() -> None:
    desk = used(desk_of(2), 1, 50, 60)
    assert select_slot(desk, ticket("a"), NOTHING, frozenset({0})) == 1
    assert select_slot(desk, ticket("a"), NOTHING, frozenset({0, 1})) is None
    assert select_slot(desk, ticket("a", pin=0), NOTHING, frozenset({0})) is None


def test_a_seat_that_was_saved_knows_how_long_its_prompt_was() -> None:
    desk = used(desk_of(1), 0, n_prompt=100, n_tokens=160)
    held = reserve_slot(
        enqueue_action(desk, SlotAction("save", 0, 1.0)), SlotAction("save", 0, 1.0)
    )
    assert release_slot(held, 0, 160, 3.0).slot(0).n_prompt == 100
    assert reset_slot(held, 0, 160, 3.0).slot(0).n_prompt == 0


def test_a_seat_that_was_left_while_it_loaded_was_not_used() -> None:
    desk = used(desk_of(1), 0, n_prompt=200, n_tokens=260, now=1.0)
    desk = start_loading(assign_slot(desk, ticket("a", n_prompt=40), 0), 0)
    seat = release_slot(desk, 0, 260, 3.0).slot(0)
    assert (seat.n_tokens, seat.n_prompt, seat.last_used) == (260, 0, 1.0)


NAMES = st.sampled_from([None, "chat-1", "chat-2", "codex-1", "alice"])


@st.composite
def desks_with_an_empty_seat(draw: st.DrawFn) -> tuple[SchedulerState, dict[int, int]]:
    """Used seats of any conversations beside one empty seat, and what a prompt shares with each."""
    n_used = draw(st.integers(1, 4))
    desk = desk_of(n_used + 1)
    shared = {n_used: 0}
    for slot in range(n_used):
        n_prompt = draw(st.integers(1, 4000))
        n_tokens = n_prompt + draw(st.integers(0, 300))
        desk = used(desk, slot, n_prompt, n_tokens, float(slot), draw(NAMES))
        shared[slot] = draw(st.integers(0, n_tokens))
    return desk, shared


@given(desks_with_an_empty_seat(), NAMES)
def test_only_a_follow_up_takes_a_used_seat_while_one_is_empty(
    drawn: tuple[SchedulerState, dict[int, int]], name: str | None
) -> None:
    desk, shared = drawn
    slot = select_slot(desk, ticket("a", name=name), Lookup(lambda _, slot: shared[slot]), NONE)
    assert slot is not None
    seat = desk.slot(slot)
    if seat.n_tokens:
        assert seat.name == name or None in (seat.name, name)
        is_named = name is not None and seat.name == name
        assert shared[slot] >= seat.n_prompt - (SLACK if is_named else 0)


@given(desks_with_an_empty_seat(), st.sampled_from(["chat-1", None]))
def test_a_prompt_that_repeats_the_last_one_is_a_follow_up(
    drawn: tuple[SchedulerState, dict[int, int]], name: str | None
) -> None:
    desk, shared = drawn
    desk = used(desk, 0, 100, 160, now=99.0, name=name)
    shared = dict.fromkeys(shared, 0) | {0: 100}
    assert (
        select_slot(desk, ticket("a", name=name), Lookup(lambda _, slot: shared[slot]), NONE) == 0
    )


def test_another_conversation_of_one_system_prompt_takes_an_empty_seat() -> None:
    desk = used(desk_of(3), 0, n_prompt=1910, n_tokens=1924, name="chat-a0")
    assert select_slot(desk, ticket("b", name="chat-b0"), shares(s0=1902), NONE) == 1
    assert select_slot(desk, ticket("a", name="chat-a0"), shares(s0=1902), NONE) == 0


def test_the_same_words_under_two_names_are_two_conversations() -> None:
    desk = used(desk_of(2), 0, n_prompt=200, n_tokens=214, name="codex-1")
    assert select_slot(desk, ticket("b", name="codex-2"), shares(s0=200), NONE) == 1


def test_raw_prompts_that_differ_at_their_end_are_told_apart_without_names() -> None:
    desk = used(desk_of(2), 0, n_prompt=200, n_tokens=214)
    assert select_slot(desk, ticket("other"), shares(s0=199), NONE) == 1
    assert select_slot(desk, ticket("again"), shares(s0=200), NONE) == 0


def test_a_restored_context_is_continued_though_its_end_is_rewritten() -> None:
    desk = used(desk_of(2), 0, n_prompt=40, n_tokens=60, name="chat-1")
    desk = reserve_slot(
        enqueue_action(desk, SlotAction("restore", 0, 1.0)), SlotAction("restore", 0, 1.0)
    )
    desk = reset_slot(desk, 0, n_tokens=5000, now=2.0)
    assert select_slot(desk, ticket("own", name="chat-2"), shares(s0=4990), NONE) == 0


def test_a_seat_knows_whose_context_it_holds() -> None:
    desk = used(desk_of(1), 0, n_prompt=100, n_tokens=160, name="chat-1")
    errand = SlotAction("save", 0, 1.0)
    assert (
        release_slot(reserve_slot(enqueue_action(desk, errand), errand), 0, 160, 3.0).slot(0).name
        == "chat-1"
    )
    taken = assign_slot(desk, ticket("b", name="chat-2"), 0)
    assert release_slot(start_loading(taken, 0), 0, 160, 3.0).slot(0).name == "chat-1", (
        "nothing was loaded yet"
    )
    assert release_slot(taken, 0, 20, 3.0).slot(0).name == "chat-2"
