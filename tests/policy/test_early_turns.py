"""Early turns: when a chunk is computed, and which agents get them."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.scheduling.chunked_prefill import ThroughputModel
from mlxstack.policy.scheduling.early_history import (
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
from mlxstack.policy.scheduling.scheduler import (
    REST_STEPS,
    EarlyChunk,
    SchedulerLimits,
    next_early_chunk,
    next_prefill_chunk,
)
from mlxstack.policy.scheduling.scheduler_state import (
    EarlyTurn,
    SchedulerState,
    SlotAction,
    SlotState,
    advance,
    advance_early,
    begin_early,
    enqueue,
    enqueue_action,
)
from tests.policy.desk_states import begun, desk_of, ticket, turn, used
from tests.policy.desk_states import given as seated

PACE = SchedulerLimits().prefill
SPEED = ThroughputModel(1000.0)


def resting(n_slots: int = 2, n_prompt: int = 2000, position: int = 500) -> SchedulerState:
    """Slot 0 has served 600 tokens, and 1,500 of the next prompt are not in KV."""
    desk = used(desk_of(n_slots), 0, 500, 600, name="a")
    desk = begin_early(desk, EarlyTurn("early", 0, n_prompt))
    desk, chunk = next_early_chunk(desk, SPEED, PACE)
    assert chunk == EarlyChunk(desk.early[0], 0), "first it is looked up"
    return advance_early(desk, chunk.turn, position, position)


def computed(desk: SchedulerState) -> tuple[SchedulerState, int]:
    """The desk after the early chunk of a step, and its tokens."""
    desk, chunk = next_early_chunk(desk, SPEED, PACE)
    if chunk is None:
        return desk, 0
    start = chunk.turn.position or 0
    return advance_early(desk, chunk.turn, start + chunk.n_tokens, 500), chunk.n_tokens


def test_an_idle_service_computes_the_whole_of_it() -> None:
    desk = resting()
    n_tokens = 0
    while desk.early:
        desk, n = computed(desk)
        n_tokens += n
    assert n_tokens == 2000 - 1 - 500
    slot = desk.slot(0)
    assert (slot.state, slot.n_tokens, slot.n_early) == (SlotState.IDLE, 1999, 1499)
    assert slot.n_prompt == 500, "only this much is surely of the conversation"


def test_a_newcomer_is_never_behind_more_than_one_chunk() -> None:
    """It comes while a chunk is computed: the next step is its own, to the end."""
    desk, n = computed(resting())
    assert n
    desk, actions = turn(enqueue(desk, ticket("new", n_prompt=3000)))
    assert seated(actions) == [("new", 1)]
    assert desk.early, "in another slot"
    while desk.slot(1).state is SlotState.PREFILLING:
        assert next_early_chunk(desk, SPEED, PACE)[1] is None
        desk, chunk = next_prefill_chunk(desk, SPEED, PACE)
        assert chunk is not None
        desk = advance(desk, 1, desk.slot(1).position + chunk.n_tokens)


def test_whatever_waits_goes_first() -> None:
    desk, _ = computed(resting())
    for waiting in (enqueue(desk, ticket("new")), enqueue_action(desk, SlotAction("save", 1, 1.0))):
        assert next_early_chunk(waiting, SPEED, PACE)[1] is None
    assert next_early_chunk(desk, SPEED, PACE)[1] is not None


def test_a_request_takes_the_slot_of_an_early_turn_at_once() -> None:
    desk, _ = computed(resting(n_slots=1))
    desk, actions = turn(enqueue(desk, ticket("new", name="b")))
    assert seated(actions) == [("new", 0)]
    assert not desk.early
    assert desk.slot(0).n_early == 0


def test_an_action_takes_the_slot_of_an_early_turn_at_once() -> None:
    desk, _ = computed(resting())
    desk, actions = turn(enqueue_action(desk, SlotAction("save", 0, 1.0)))
    assert begun(actions) == ["save"]
    assert not desk.early


def test_decoding_requests_are_stalled_in_one_step_of_a_hundred() -> None:
    desk, _ = turn(enqueue(resting(), ticket("new", n_prompt=1)))
    desk = advance(desk, 1, 0)
    assert desk.slot(1).state is SlotState.RUNNING
    chunks = []
    for _ in range(3 * (REST_STEPS + 1)):
        desk, n = computed(desk)
        chunks.append(n > 0)
    assert sum(chunks) == 3
    assert sum(chunks) / len(chunks) < 0.01


def test_a_new_answer_replaces_the_early_turn_of_its_slot() -> None:
    desk = begin_early(resting(), EarlyTurn("later", 0, 900))
    assert [turn.request for turn in desk.early] == ["later"]


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
