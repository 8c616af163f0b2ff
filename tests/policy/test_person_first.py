"""A turn that a person waits for goes first, and passes no other beyond a bound."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.bench.dev.simulation.simulate import SimulatedMachine, simulate
from mlxstack.bench.dev.simulation.workload import PlannedRequest, SimulatedAgent
from mlxstack.core.request import Priority, Request, TurnKind
from mlxstack.policy.scheduling.chunked_prefill import (
    GROWTH,
    PrefillPolicy,
    ThroughputModel,
    chunk_size,
    is_person_first,
    next_to_prefill,
    prefill_s,
)
from mlxstack.policy.scheduling.scheduler import (
    SchedulerLimits,
    next_prefill_chunk,
    sort_queue,
    turn_priority,
)
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    Slot,
    SlotState,
    advance,
    assign_slot,
    initial_state,
    release_slot,
)
from tests.policy.scheduler_states import desk_of, ticket, turn, used
from tests.policy.scheduler_states import given as assigned

POLICY = PrefillPolicy()
AGING = SchedulerLimits().aging_per_s
UNATTENDED = tuple(kind for kind in TurnKind if kind is not TurnKind.PERSON)
priorities = st.sampled_from(Priority)
kinds = st.sampled_from(TurnKind)


def request(name: str, kind: TurnKind, arrived: float = 0.0, **more: Any) -> Request:
    priority = turn_priority(Priority.NORMAL, None, kind)
    return ticket(name, arrived, priority, turn_kind=kind, **more)


@given(priorities, kinds)
def test_a_kind_of_turn_raises_no_priority(priority: Priority, kind: TurnKind) -> None:
    found = turn_priority(priority, None, kind)
    assert priority <= found <= priority + (kind is not TurnKind.PERSON)


@given(priorities, priorities, kinds)
def test_the_priority_of_an_agent_wins_over_the_kind_and_yields_to_the_key(
    priority: Priority, of_agent: Priority, kind: TurnKind
) -> None:
    found = turn_priority(priority, of_agent, kind)
    if priority is Priority.NORMAL:
        assert found is of_agent
    else:
        assert found == turn_priority(priority, None, kind)


@given(st.lists(st.tuples(kinds, st.floats(0, 100)), min_size=1, max_size=12), st.floats(0, 1000))
def test_a_queued_turn_is_passed_only_by_those_of_the_next_ten_seconds(
    turns: list[tuple[TurnKind, float]], later_s: float
) -> None:
    queue = [request(str(i), kind, arrived) for i, (kind, arrived) in enumerate(turns)]
    now = max(arrived for _, arrived in turns) + later_s
    served = sort_queue(queue, now, AGING)
    for position, late in enumerate(served):
        for passing in served[:position]:
            assert passing.arrived <= late.arrived + 1 / AGING + 1e-6


def prefilling(*requests: Request) -> SchedulerState:
    state = initial_state(len(requests))
    for slot, one in enumerate(requests):
        state = assign_slot(state, one, slot)
    return state


@given(
    st.lists(st.sampled_from(UNATTENDED), min_size=1, max_size=4),
    st.lists(st.integers(50, 4000), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_prompts_of_persons_get_fifteen_of_sixteen_chunks(
    unattended: list[TurnKind], lengths: list[int], seed: int
) -> None:
    """Persons send new prompts for ever; no prompt of others is passed more than 15 times."""
    chance = Random(seed)
    requests = [request(f"s{i}", kind, i, n_prompt=3000) for i, kind in enumerate(unattended)]
    requests += [
        request(f"p{i}", TurnKind.PERSON, 100.0 + i, n_prompt=n) for i, n in enumerate(lengths)
    ]
    state = prefilling(*requests)
    passed = n_of_others = 0
    for step in range(100):
        state, chunk = next_prefill_chunk(state, ThroughputModel(1000.0), POLICY)
        assert chunk is not None
        slot = state.slot(chunk.slot)
        assert slot.request is not None
        is_person = slot.request.caller.turn_kind is TurnKind.PERSON
        n_of_others += not is_person
        passed = passed + 1 if is_person else 0
        if any(s.request and s.request.id.startswith("s") and s.n_left for s in state.slots):
            assert passed <= POLICY.max_passed_unattended
        n_tokens = min(chunk.n_tokens, chance.randint(16, 64))
        state = advance(state, chunk.slot, slot.position + n_tokens)
        if state.slot(chunk.slot).state is SlotState.RUNNING:
            state = release_slot(state, chunk.slot, 1, step)
            again = request(f"p{step}", TurnKind.PERSON, 200.0 + step, n_prompt=500)
            state = assign_slot(state, again, chunk.slot)
    assert n_of_others <= 100 / (POLICY.max_passed_unattended + 1) + 1


@given(st.integers(0, 14))
def test_a_persons_prompt_passes_older_and_shorter_ones(n_passed: int) -> None:
    older = Slot(
        0, SlotState.PREFILLING, request("s", TurnKind.SUBAGENT), n_prompt=60, n_passed=n_passed
    )
    person = Slot(
        1, SlotState.PREFILLING, request("p", TurnKind.PERSON, arrived=5.0), n_prompt=4000
    )
    assert next_to_prefill([older, person], POLICY).id == 1


@given(st.floats(0.0, 0.5), st.floats(200.0, 20_000.0), st.integers(1, 8))
def test_beside_unattended_answers_a_person_gets_nine_tenths(
    decode_s: float, tps: float, n_decoding: int
) -> None:
    speed = ThroughputModel(tps, decode_s, n_largest=2048)
    slot = Slot(0, SlotState.PREFILLING, request("p", TurnKind.PERSON), n_prompt=100_000)
    decoding = [
        Slot(i + 1, SlotState.RUNNING, request(str(i), TurnKind.SUBAGENT))
        for i in range(n_decoding)
    ]
    assert is_person_first(slot, decoding)
    n_tokens = chunk_size(slot, n_decoding, speed, POLICY, is_first=True)
    seconds = prefill_s(speed, 0, n_tokens)
    assert seconds <= POLICY.patience_s + 16 / tps
    plain_s = prefill_s(speed, 0, chunk_size(slot, n_decoding, speed, POLICY))
    assert seconds >= plain_s
    # Chunks end on blocks, and at their longest.
    is_cut = n_tokens >= POLICY.max_chunk_size or 9 * decode_s > POLICY.patience_s
    assert is_cut or n_tokens + POLICY.block >= min(2048 * GROWTH, 9 * decode_s * tps)


def test_the_bound_on_stalls_holds_for_answers_that_a_person_reads() -> None:
    slot = Slot(0, SlotState.PREFILLING, request("p", TurnKind.PERSON), n_prompt=4000)
    person = Slot(1, SlotState.RUNNING, request("q", TurnKind.PERSON))
    helper = Slot(2, SlotState.RUNNING, request("s", TurnKind.SUBAGENT))
    assert not is_person_first(slot, [person, helper])
    assert not is_person_first(slot, [])
    raised = ticket("r", 0.0, Priority.NORMAL, turn_kind=TurnKind.SUBAGENT)
    assert not is_person_first(slot, [Slot(2, SlotState.RUNNING, raised)])


def sub_agents(n_prompt: int, n_answer: int) -> list[SimulatedAgent]:
    """Three sub-agents that are busy for the whole time."""
    asks = tuple(PlannedRequest(0.0, n_prompt, n_answer) for _ in range(10))
    return [SimulatedAgent(f"sub {n}", asks, Priority.LOW, TurnKind.SUBAGENT) for n in range(3)]


@pytest.mark.parametrize(
    ("n_prompt", "n_answer"), [(200, 5000), (30_000, 20), (4000, 200)], ids=str
)
@pytest.mark.parametrize("step_s", [0.005, 0.05])
def test_the_first_token_of_a_person_beside_three_sub_agents(
    n_prompt: int, n_answer: int, step_s: float
) -> None:
    """On a machine of any speed: at most 1.2 of alone, for a prompt of six seconds."""
    machine = SimulatedMachine(n_slots=4, step_s=step_s, row_s=0.002)
    person = SimulatedAgent("person", (PlannedRequest(3.0, 9000, 20),))
    subs = sub_agents(n_prompt, n_answer)
    alone = simulate([person], machine, SchedulerLimits()).waits[0].ttft.max
    beside = simulate([person, *subs], machine, SchedulerLimits())
    waits = {wait.priority: wait for wait in beside.waits}
    assert waits[Priority.NORMAL].ttft.max <= 1.2 * alone
    assert waits[Priority.LOW].n_asks == 30, "each sub-agent ends"


def test_no_sub_agent_waits_beyond_the_aging_bound() -> None:
    """One slot, and a person who asks again at once: sub-agents wait ten seconds and a turn."""
    machine = SimulatedMachine(n_slots=1)
    asks = tuple(PlannedRequest(0.0, 1000, 50) for _ in range(60))
    persons = [SimulatedAgent(f"person {n}", asks) for n in range(2)]
    sub = SimulatedAgent(
        "sub", (PlannedRequest(1.0, 1000, 50),) * 5, Priority.LOW, TurnKind.SUBAGENT
    )
    report = simulate([*persons, sub], machine, SchedulerLimits())
    waits = {wait.priority: wait.waited for wait in report.waits}
    turn_s = report.busy_s / report.n_asks
    assert waits[Priority.LOW].max <= 1 / AGING + 3 * turn_s


def test_a_request_that_drops_its_kv_takes_an_empty_slot_else_the_longest_unused() -> None:
    desk = used(used(desk_of(3), 0, 500, 520, now=2.0, name="a"), 1, 500, 520, now=1.0, name="b")
    shot = ticket("shot", 3.0, name=None, n_prompt=500)
    shot = replace(shot, drops_kv=True)
    after, actions = turn(replace(desk, waiting=(shot,)))
    assert assigned(actions) == [("shot", 2)]
    assert release_slot(after, 2, 0, 9.0).slots == desk.slots
    full = used(desk, 2, 500, 520, now=3.0, name="c")
    after, actions = turn(replace(full, waiting=(shot,)))
    assert assigned(actions) == [("shot", 1)]
    assert release_slot(after, 1, 520, 9.0).slots == full.slots
    lost = release_slot(after, 1, 0, 9.0).slots[1]
    assert lost == Slot(1, last_used=1.0)
