"""How big a bite of which prompt."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.scheduling.chunked_prefill import (
    FINEST,
    PrefillPolicy,
    RegressionSums,
    ThroughputModel,
    chunk_size,
    next_to_prefill,
    observe_prefill,
    prefill_s,
    tokens_within_scores,
)
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, next_prefill_chunk
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    Slot,
    SlotState,
    advance,
    enqueue,
    release_slot,
    skip,
)
from tests.policy.scheduler_states import desk_of, ticket, turn

TPS = 1000.0


def seat(
    position: int, n_prompt: int, arrived: float = 0.0, slot: int = 0, n_passed: int = 0
) -> Slot:
    """A prompt that stands at `position`."""
    one = ticket(str(slot), arrived, n_prompt=n_prompt)
    return Slot(slot, SlotState.PREFILLING, one, 0, position, n_prompt, n_passed)


seats = st.builds(
    lambda position, n_left: seat(position, position + n_left + 1),
    st.integers(0, 120_000),
    st.integers(1, 120_000),
)
speeds = st.builds(
    ThroughputModel,
    st.floats(20, 20_000),
    st.floats(0, 0.4),
    st.floats(0, 1e-4),
    st.just(RegressionSums()),
)
paces = st.builds(
    PrefillPolicy,
    max_stall_s=st.floats(0.02, 1.0),
    patience_s=st.floats(0.1, 2.0),
    max_chunk_size=st.integers(FINEST, 4096),
    block=st.sampled_from((16, 64, 128, 256)),
)


@given(seats, speeds, paces, st.integers(1, 8))
def test_e14_bite_and_decode_step_stay_inside_max_stall(
    one: Slot, speed: ThroughputModel, policy: PrefillPolicy, n_decoding: int
) -> None:
    n = chunk_size(one, n_decoding, speed, policy)
    silence = prefill_s(speed, one.position, n) + speed.decode_s
    one_unit = prefill_s(speed, one.position, FINEST)
    assert silence <= max(policy.max_stall_s, one_unit + speed.decode_s) + 1e-9
    if n > FINEST:
        assert silence <= policy.max_stall_s


@given(seats, speeds, paces)
def test_e14_alone_a_bite_is_bounded_by_patience(
    one: Slot, speed: ThroughputModel, policy: PrefillPolicy
) -> None:
    n = chunk_size(one, 0, speed, policy)
    assert n <= FINEST or prefill_s(speed, one.position, n) <= policy.patience_s


@given(seats, speeds, paces, st.integers(0, 8))
def test_e14_every_bite_makes_progress_and_none_is_longer_than_allowed(
    one: Slot, speed: ThroughputModel, policy: PrefillPolicy, n_decoding: int
) -> None:
    assert 1 <= chunk_size(one, n_decoding, speed, policy) <= min(one.n_left, policy.max_chunk_size)


@given(seats, speeds, paces, st.integers(0, 8))
def test_d2_bites_end_on_blocks_whenever_the_budget_reaches_one(
    one: Slot, speed: ThroughputModel, policy: PrefillPolicy, n_decoding: int
) -> None:
    n = chunk_size(one, n_decoding, speed, policy)
    end = one.position + n
    if n == one.n_left:
        return
    if end % policy.block:
        assert end % FINEST == 0
        assert end // policy.block == one.position // policy.block, (
            "no block boundary was passed by"
        )


def test_e14_the_first_bite_ever_is_one_block() -> None:
    assert chunk_size(seat(0, 4000), 1, ThroughputModel(), PrefillPolicy(block=128)) == 128


def test_e14_a_decode_step_slower_than_the_bound_leaves_the_finest_bite() -> None:
    assert (
        chunk_size(seat(0, 4000), 8, ThroughputModel(TPS, decode_s=0.5), PrefillPolicy()) == FINEST
    )


def test_e14_the_known_example() -> None:
    """0.9 x 0.25 s - 0.025 s at 1,000 tokens per second are 200 tokens, hence one block."""
    assert chunk_size(seat(0, 4000), 3, ThroughputModel(TPS, 0.025), PrefillPolicy()) == 128
    assert chunk_size(seat(100, 4000), 3, ThroughputModel(TPS, 0.025), PrefillPolicy()) == 156
    assert chunk_size(seat(0, 4000), 0, ThroughputModel(TPS, 0.025), PrefillPolicy()) == 896


def test_beside_decoders_a_chunk_is_at_most_twice_as_long_as_any_before() -> None:
    """The seconds of 300 tokens do not tell those of 2,000, whose attention may be slower."""
    speed = observe_prefill(ThroughputModel(), 0, 300, 0.01)
    assert chunk_size(seat(0, 4000), 1, speed, PrefillPolicy()) == 512
    assert chunk_size(seat(0, 4000), 0, speed, PrefillPolicy()) == 2048
    speed = observe_prefill(speed, 0, 100, 0.01)
    assert chunk_size(seat(0, 4000), 1, speed, PrefillPolicy()) == 512


def test_z7_the_shortest_remaining_prompt_goes_first() -> None:
    two = [seat(0, 4000), seat(0, 51, arrived=1.0, slot=1)]
    assert next_to_prefill(two, PrefillPolicy()).id == 1
    nearly_done = [seat(3990, 4000), seat(0, 51, arrived=1.0, slot=1)]
    assert next_to_prefill(nearly_done, PrefillPolicy()).id == 0


def test_z7_equal_prompts_go_by_arrival() -> None:
    two = [seat(0, 500, arrived=2.0), seat(0, 500, arrived=1.0, slot=1)]
    assert next_to_prefill(two, PrefillPolicy()).id == 1


def test_z7_who_came_first_is_passed_over_three_times_at_most() -> None:
    short = seat(0, 51, arrived=1.0, slot=1)
    assert next_to_prefill([seat(0, 4000, n_passed=2), short], PrefillPolicy()).id == 1
    assert next_to_prefill([seat(0, 4000, n_passed=3), short], PrefillPolicy()).id == 0


def test_z7_passing_over_counts_only_those_who_prefill() -> None:
    desk, _ = turn(desk_of(4, *(ticket(str(n), n) for n in range(3))))
    desk = skip(skip(advance(desk, 2, 99), {0}), {0})
    assert [s.n_passed for s in desk.slots] == [0, 2, 0, 0]
    assert [s.n_passed for s in skip(desk, {1}).slots] == [1, 0, 0, 0]


def flood(n_long: int, n_short: int, n_turns: int) -> tuple[list[int], int]:
    """A long prompt in slot 0 while short ones never stop coming to slot 1, one at a time.

    Returns how many turns each short one took to its last bite, and where the long one stands.
    """
    desk: SchedulerState = desk_of(2, ticket("long", 0.0, n_prompt=n_long, pin=0))
    delays: list[int] = []
    since = 0
    for now in range(n_turns):
        if desk.slot(1).state is SlotState.IDLE and not desk.waiting:
            desk = enqueue(desk, ticket(f"short-{now}", now, n_prompt=n_short, pin=1))
            since = now
        desk, _ = turn(desk, now)
        desk, step = next_prefill_chunk(desk, ThroughputModel(TPS), SchedulerLimits().prefill)
        assert step is not None
        desk = advance(desk, step.slot, desk.slot(step.slot).position + step.n_tokens)
        for one in desk.slots:
            if one.state is SlotState.RUNNING and one.id == 1:
                delays.append(now - since)
                desk = release_slot(desk, 1, 0, now)
        if desk.slot(0).state is not SlotState.PREFILLING:
            break
    return delays, desk.slot(0).position


@given(st.integers(2000, 60_000), st.integers(2, 600))
def test_z7_a_stream_of_short_prompts_neither_starves_a_long_one_nor_waits_for_it(
    n_long: int, n_short: int
) -> None:
    n_bites = -(-n_long // 512)
    delays, position = flood(n_long, n_short, n_turns=4 * n_bites + 4)
    assert position == n_long - 1, "the long prompt got one bite of four"
    assert max(delays) <= 1, "a short prompt waits for one bite of the long one at most"


@given(
    seats,
    speeds,
    st.integers(0, 8),
    st.integers(1, 256),
    st.integers(2**20, 2**31),
    st.sampled_from((512, 2048)),
)
def test_m6_attention_scores_of_a_chunk_are_bounded_in_bytes(
    one: Slot, speed: ThroughputModel, n_decoding: int, score_bytes: int, most: int, chunk: int
) -> None:
    policy = PrefillPolicy(max_chunk_size=chunk, score_bytes=score_bytes, max_score_bytes=most)
    n = chunk_size(one, n_decoding, speed, policy)
    assert n <= FINEST or n * (one.position + n) * score_bytes <= most
    widest = tokens_within_scores(one.position, policy)
    assert widest == chunk or (widest + 1) * (one.position + widest + 1) * score_bytes > most


def test_m6_fused_attention_bounds_no_chunk() -> None:
    assert tokens_within_scores(100_000, PrefillPolicy(max_chunk_size=2048)) == 2048


m5_paces = st.builds(
    PrefillPolicy,
    max_stall_s=st.floats(0.02, 1.0),
    max_chunk_size=st.sampled_from((512, 2048, 4096)),
    block=st.sampled_from((16, 128, 256)),
    score_bytes=st.just(64),
    max_score_bytes=st.just(2**30),
    fused_from=st.just(1024),
)


@given(seats, speeds, m5_paces, st.integers(0, 8))
def test_a6_a_chunk_is_fused_or_its_scores_are_bounded(
    slot: Slot, speed: ThroughputModel, policy: PrefillPolicy, n_decoding: int
) -> None:
    n = chunk_size(slot, n_decoding, speed, policy)
    is_fused = n >= policy.fused_from
    assert is_fused or n <= FINEST or n * (slot.position + n) * 64 <= 2**30
    assert n <= max(FINEST, policy.max_chunk_size)


@given(st.integers(0, 200_000), st.integers(1024, 200_000))
def test_a6_no_chunk_of_a_long_prompt_loses_the_fused_kernel(position: int, n_left: int) -> None:
    policy = PrefillPolicy(
        max_chunk_size=2048, block=128, score_bytes=64, max_score_bytes=2**30, fused_from=1024
    )
    speed = ThroughputModel(prefill_tps=1e6, n_largest=2048)
    end = position + n_left
    chunks = []
    while position < end:
        n = chunk_size(seat(position, end + 1), 0, speed, policy)
        chunks.append(n)
        position += n
    # The last one is shorter only where fewer than two fused chunks were left before.
    assert all(n >= 1024 for n in chunks)


def test_a6_a_stall_bound_below_the_fused_kernel_leaves_the_bound_on_scores() -> None:
    policy = PrefillPolicy(
        max_chunk_size=2048, block=128, score_bytes=64, max_score_bytes=2**30, fused_from=1024
    )
    speed = ThroughputModel(prefill_tps=2000, decode_s=0.01, n_largest=2048)
    n = chunk_size(seat(60_000, 120_000), 1, speed, policy)
    assert n <= tokens_within_scores(60_000, policy) < 1024
