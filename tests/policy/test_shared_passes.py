"""Prompts that share a pass: short ones, in their order, within the time of a chunk."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.request import Priority
from mlxstack.policy.pass_layout import SharingCosts, max_shared
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, ThroughputModel, prefill_s
from mlxstack.policy.scheduling.scheduler import PrefillChunk, next_prefill_chunk
from mlxstack.policy.scheduling.scheduler_state import SchedulerState, Slot, SlotState
from tests.policy.scheduler_states import ticket

SPEED = ThroughputModel(prefill_tps=1000.0, decode_s=0.02, n_largest=2048)
POLICY = PrefillPolicy(max_shared=64)


def prefilling(
    n_lefts: list[int], priorities: list[Priority] | None = None, position: int = 0
) -> SchedulerState:
    """Prompts with so many tokens left, each in the slot of its place."""
    named = priorities or [Priority.NORMAL] * len(n_lefts)
    slots = []
    for i, (n_left, priority) in enumerate(zip(n_lefts, named, strict=True)):
        n_prompt = position + n_left + 1
        request = ticket(str(i), float(i), priority, n_prompt=n_prompt)
        slots.append(Slot(i, SlotState.PREFILLING, request, 0, position, n_prompt))
    return SchedulerState(tuple(slots))


def chunk_of(state: SchedulerState, policy: PrefillPolicy = POLICY) -> PrefillChunk:
    _, chunk = next_prefill_chunk(state, SPEED, policy)
    assert chunk is not None
    return chunk


def test_short_prompts_share_a_pass_to_their_ends() -> None:
    chunk = chunk_of(prefilling([40, 30, 64]))
    assert [(part.slot, part.n_tokens) for part in (chunk, *chunk.beside)] == [
        (1, 30),
        (0, 40),
        (2, 64),
    ]


def test_prompts_of_the_pass_are_not_counted_as_passed_over() -> None:
    state, _ = next_prefill_chunk(prefilling([40, 30, 65]), SPEED, POLICY)
    assert [slot.n_passed for slot in state.slots] == [0, 0, 1]


def test_a_long_prompt_has_a_pass_of_its_own() -> None:
    assert not chunk_of(prefilling([65, 70])).beside
    assert not chunk_of(prefilling([30, 65])).beside


def test_a_prompt_waits_for_none_that_is_less_urgent() -> None:
    chunk = chunk_of(prefilling([40, 30], [Priority.HIGH, Priority.NORMAL]))
    assert (chunk.slot, chunk.beside) == (0, ())


def test_a_pass_ends_within_the_bound_on_stalls() -> None:
    """205 tokens fit beside a decode step: three prompts of 64, and fewer of 68 for their rows."""
    policy = PrefillPolicy(max_shared=100)
    for n_left, n_together in ((64, 3), (68, 2)):
        state = prefilling([n_left] * 4)
        running = replace(state.slots[0], id=4, state=SlotState.RUNNING, has_token=True)
        chunk = chunk_of(SchedulerState((*state.slots, running)), policy)
        assert len(chunk.slots) == n_together


def test_padded_prompts_are_alike_and_take_as_long_as_the_longest() -> None:
    policy = replace(POLICY, is_padded=True)
    assert chunk_of(prefilling([20, 40, 41]), policy).slots == (0, 1)
    state = prefilling([40, 50, 60, 64])
    running = replace(state.slots[0], id=4, state=SlotState.RUNNING, has_token=True)
    chunk = chunk_of(SchedulerState((*state.slots, running)), policy)
    assert chunk.slots == (0, 1, 2), "4 x 64 tokens are more than 205"


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.data(),
    st.integers(0, 60_000),
    st.integers(0, 256),
    st.floats(0, 1e-4),
)
def test_a_shared_pass_keeps_order_and_time(
    n_lefts: list[int], data: st.DataObject, position: int, longest: int, slowdown: float
) -> None:
    """The first chunk is that of a pass of its own; the others are of the prompts after it."""
    priorities = [data.draw(st.sampled_from(Priority)) for _ in n_lefts]
    state = prefilling(n_lefts, priorities, position)
    speed = replace(SPEED, slowdown=slowdown)
    policy = PrefillPolicy(max_shared=longest)
    after, chunk = next_prefill_chunk(state, speed, policy)
    _, alone = next_prefill_chunk(state, speed, PrefillPolicy())
    assert chunk is not None and alone is not None
    assert replace(chunk, beside=()) == alone
    assert len(set(chunk.slots)) == len(chunk.slots)
    assert {slot.id for slot in after.slots if not slot.n_passed} == set(chunk.slots)
    if not chunk.beside:
        return
    first_to_last = sorted(
        state.slots, key=lambda slot: (priorities[slot.id], slot.n_left, slot.id)
    )
    assert [slot.id for slot in first_to_last[: len(chunk.slots)]] == list(chunk.slots)
    parts = (chunk, *chunk.beside)
    assert all(part.n_tokens == n_lefts[part.slot] <= longest for part in parts)
    assert len({priorities[part.slot] for part in parts}) == 1
    seconds = sum(prefill_s(speed, position, part.n_tokens) for part in parts)
    assert seconds <= policy.patience_s * 1.001


def costs(n_tokens: int, fixed: float = 10.0) -> SharingCosts:
    """Of passes that take a fixed time, and 1 for each token."""
    return SharingCosts(n_tokens, fixed + n_tokens, fixed + 2 * n_tokens)


def test_prompts_gain_while_their_tokens_cost_less_than_the_pass() -> None:
    """Two of 35 tokens take 80 instead of 100, two of 36 take 82 instead of 102."""
    assert costs(34).gain_s(10) > 0 > costs(36).gain_s(10)
    assert max_shared(map(costs, (16, 32, 64, 128)), 10) in {34, 35}


def test_no_prompts_share_where_none_gain() -> None:
    assert max_shared(map(costs, (64, 128)), 10) == 0
    assert max_shared([SharingCosts(16, 1.0, 2.0)], 0.0) == 0
    assert max_shared([], 10) == 0


def test_prompts_share_as_far_as_was_measured() -> None:
    assert max_shared([costs(16), costs(32)], 10) == 32


@given(st.lists(st.integers(1, 500), min_size=1, unique=True), st.floats(0.1, 100))
def test_the_longest_that_gains_is_found_between_lengths(lengths: list[int], fixed: float) -> None:
    """The gain is linear in these, so that it is exact but for the rounding."""
    measured = [costs(n, fixed) for n in sorted(lengths)]
    longest = max_shared(measured, fixed)
    if longest:
        assert costs(longest - 1, fixed).gain_s(fixed) > -1e-6
        is_all = longest == measured[-1].n_tokens
        assert is_all or costs(longest + 1, fixed).gain_s(fixed) < 1e-6
    else:
        assert measured[0].gain_s(fixed) <= 0
