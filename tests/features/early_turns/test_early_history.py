"""Early turns: when a chunk is computed, and which agents get them."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.features.early_turns.history import (
    HOUR_S,
    MAX_TOKENS,
    MAX_WASTED,
    MIN_TOKENS,
    EarlyHistory,
    first_history,
    may_begin,
    note_begun,
    note_used,
)
from mlxstack.features.early_turns.policy import (
    REST_STEPS,
    EarlyChunk,
    EarlyQueue,
    EarlyTurn,
    advance,
    begin,
    next_chunk,
)
from mlxstack.policy.scheduling.chunked_prefill import ThroughputModel
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, next_prefill_chunk
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    SlotAction,
    SlotState,
    enqueue,
    enqueue_action,
    set_context,
)
from mlxstack.policy.scheduling.scheduler_state import advance as prefilled
from tests.policy.scheduler_states import desk_of, ticket, turn, used
from tests.policy.scheduler_states import given as seated

PACE = SchedulerLimits().prefill
SPEED = ThroughputModel(1000.0)
N_PROMPT = 2000
START = 500
QUEUE = EarlyQueue((EarlyTurn(0, N_PROMPT, START),))
"""Slot 0 has served 600 tokens, and 1,500 of the next prompt are not in KV."""


def resting(n_slots: int = 2) -> SchedulerState:
    desk = used(desk_of(n_slots), 0, 500, 600, name="a")
    return set_context(desk, 0, START, START)


def computed(queue: EarlyQueue, desk: SchedulerState) -> tuple[EarlyQueue, int]:
    """The queue after the early chunk of a step, and its tokens."""
    queue, chunk = next_chunk(queue, desk, SPEED, PACE)
    if chunk is None:
        return queue, 0
    start = chunk.early_turn.position or 0
    return advance(queue, chunk.early_turn, start + chunk.n_tokens), chunk.n_tokens


def test_the_cached_prefix_is_looked_up_first() -> None:
    queue = begin(EarlyQueue(), EarlyTurn(0, N_PROMPT))
    queue, chunk = next_chunk(queue, resting(), SPEED, PACE)
    assert chunk == EarlyChunk(queue.turns[0], 0)
    assert advance(queue, chunk.early_turn, START) == QUEUE


def test_an_idle_service_computes_the_whole_of_it() -> None:
    queue = QUEUE
    n_tokens = 0
    while queue.turns:
        queue, n = computed(queue, resting())
        n_tokens += n
    assert n_tokens == N_PROMPT - 1 - START


def test_of_another_context_only_the_kept_tokens_are_of_the_conversation() -> None:
    slot = set_context(resting(), 0, 1999, 450).slot(0)
    assert (slot.state, slot.n_tokens, slot.n_prompt) == (SlotState.IDLE, 1999, 450)


def test_a_newcomer_is_never_behind_more_than_one_chunk() -> None:
    """It comes while a chunk is computed: the next step is its own, to the end."""
    queue, n = computed(QUEUE, resting())
    assert n
    desk, actions = turn(enqueue(resting(), ticket("new", n_prompt=3000)))
    assert seated(actions) == [("new", 1)]
    while desk.slot(1).state is SlotState.PREFILLING:
        assert next_chunk(queue, desk, SPEED, PACE)[1] is None
        desk, chunk = next_prefill_chunk(desk, SPEED, PACE)
        assert chunk is not None
        desk = prefilled(desk, 1, desk.slot(1).position + chunk.n_tokens)


def test_whatever_waits_goes_first() -> None:
    desk = resting()
    for waiting in (enqueue(desk, ticket("new")), enqueue_action(desk, SlotAction("save", 1, 1.0))):
        assert next_chunk(QUEUE, waiting, SPEED, PACE)[1] is None
    assert next_chunk(QUEUE, desk, SPEED, PACE)[1] is not None


def test_decoding_requests_are_stalled_in_one_step_of_a_hundred() -> None:
    desk, _ = turn(enqueue(resting(), ticket("new", n_prompt=1)))
    desk = prefilled(desk, 1, 0)
    assert desk.slot(1).state is SlotState.RUNNING
    queue = QUEUE
    chunks = []
    for _ in range(3 * (REST_STEPS + 1)):
        queue, n = computed(queue, desk)
        chunks.append(n > 0)
    assert sum(chunks) == 3
    assert sum(chunks) / len(chunks) < 0.01


def test_a_new_answer_replaces_the_early_turn_of_its_slot() -> None:
    assert begin(QUEUE, EarlyTurn(0, 900)).turns == (EarlyTurn(0, 900),)


def test_few_tokens_are_not_worth_it() -> None:
    assert not may_begin(EarlyHistory(), MIN_TOKENS - 1, 0.0)
    assert may_begin(EarlyHistory(), MIN_TOKENS, 0.0)


def test_an_agent_whose_early_turns_are_wasted_gets_one_an_hour() -> None:
    history = EarlyHistory()
    for _ in range(MAX_WASTED):
        assert may_begin(history, 1000, 10.0)
        history = note_used(note_begun(history, 1000, 10.0), 1000, 0)
    assert not may_begin(history, 1000, 10.0 + HOUR_S - 1)
    assert may_begin(history, 1000, 10.0 + HOUR_S)
    history = note_begun(history, 1000, 10.0 + HOUR_S)
    assert not may_begin(history, 1000, 11.0 + HOUR_S)
    assert may_begin(note_used(history, 1000, 900), 1000, 11.0 + HOUR_S), "trusted again"


def test_a_new_agent_is_trusted_as_its_client_is() -> None:
    client = EarlyHistory()
    for _ in range(MAX_WASTED):
        client = note_used(note_begun(client, 1000, 10.0), 1000, 0)
    new = first_history(client)
    assert not may_begin(new, 1000, 10.0 + HOUR_S - 1)
    assert may_begin(new, 1000, 10.0 + HOUR_S)
    trusted = first_history(note_used(client, 1000, 1000))
    assert may_begin(trusted, MAX_TOKENS, 11.0), "its tokens are its own"


@given(st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.floats(0, HOUR_S / 10))))
def test_tokens_of_an_hour_are_bounded(steps: list[tuple[int, float]]) -> None:
    history = EarlyHistory()
    now = HOUR_S
    times = [(0.0, 0)]
    for n_tokens, later in steps:
        now += later
        if may_begin(history, n_tokens, now):
            history = note_begun(history, n_tokens, now)
            times.append((now, n_tokens))
    for began, _ in times:
        window = sum(n for at, n in times if began <= at < began + HOUR_S)
        assert window <= 2 * MAX_TOKENS, "two fixed hours touch any hour"
