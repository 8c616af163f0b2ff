"""Prompts that share a pass: short ones, in their order, within the time of a chunk."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.request import Priority
from mlxstack.policy.pass_layout import shortens_waits
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


def test_who_is_in_the_pass_was_not_passed_over() -> None:
    state, _ = next_prefill_chunk(prefilling([40, 30, 65]), SPEED, POLICY)
    assert [slot.n_passed for slot in state.slots] == [0, 0, 1]


def test_a_long_prompt_has_a_pass_of_its_own() -> None:
    assert not chunk_of(prefilling([65, 70])).beside
    assert not chunk_of(prefilling([30, 65])).beside


def test_a_prompt_waits_for_none_that_is_less_urgent() -> None:
    chunk = chunk_of(prefilling([40, 30], [Priority.HIGH, Priority.NORMAL]))
    assert (chunk.slot, chunk.beside) == (0, ())


def test_a_pass_ends_within_the_bound_on_stalls() -> None:
    """205 tokens fit beside a decode step: three prompts of 64, not four."""
    state = prefilling([64] * 4)
    running = replace(state.slots[0], id=4, state=SlotState.RUNNING, has_token=True)
    chunk = chunk_of(SchedulerState((*state.slots, running)))
    assert len(chunk.slots) == 3


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.data(),
    st.integers(0, 60_000),
    st.integers(0, 256),
    st.floats(0, 1e-4),
)
def test_a_shared_pass_keeps_order_and_time(
    n_lefts: list[int], data: st.DataObject, position: int, max_shared: int, slowdown: float
) -> None:
    """The first chunk is the one without company, the others are those that would come next."""
    priorities = [data.draw(st.sampled_from(Priority)) for _ in n_lefts]
    state = prefilling(n_lefts, priorities, position)
    speed = replace(SPEED, slowdown=slowdown)
    policy = PrefillPolicy(max_shared=max_shared)
    after, chunk = next_prefill_chunk(state, speed, policy)
    _, alone = next_prefill_chunk(state, speed, PrefillPolicy())
    assert chunk is not None and alone is not None
    assert replace(chunk, beside=()) == alone
    assert len(set(chunk.slots)) == len(chunk.slots)
    assert {slot.id for slot in after.slots if not slot.n_passed} == set(chunk.slots)
    if not chunk.beside:
        return
    order = sorted(state.slots, key=lambda slot: (priorities[slot.id], slot.n_left, slot.id))
    assert [slot.id for slot in order[: len(chunk.slots)]] == list(chunk.slots)
    parts = (chunk, *chunk.beside)
    assert all(part.n_tokens == n_lefts[part.slot] <= max_shared for part in parts)
    assert len({priorities[part.slot] for part in parts}) == 1
    seconds = sum(prefill_s(speed, position, part.n_tokens) for part in parts)
    assert seconds <= policy.patience_s * 1.001


def test_sharing_pays_while_tokens_are_cheap_beside_weights() -> None:
    """A pass of 10 ms, and 1 ms for each token: up to 20 tokens in a prompt."""

    def pays(n_tokens: int) -> bool:
        return shortens_waits(10 + n_tokens, 10 + 2 * n_tokens, step_s=10)

    assert pays(19)
    assert not pays(21)
