"""Newcomers: prompts that arrive together, where a decode step is long for the bound on stalls."""

from collections.abc import Sequence
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.bench.dev.simulation.report import SimulatedRequest, SimulationReport, report_of
from mlxstack.bench.dev.simulation.simulate import SimulatedMachine, simulate
from mlxstack.bench.dev.simulation.workload import PlannedRequest, SimulatedAgent
from mlxstack.core.image import FIRST_VIRTUAL, ImageSize
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens
from mlxstack.core.request import Priority
from mlxstack.policy.scheduling import scheduler
from mlxstack.policy.scheduling.chunked_prefill import (
    HEADROOM,
    TOGETHER_S,
    PrefillPolicy,
    ThroughputModel,
    prefill_s,
)
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, next_prefill_chunk
from mlxstack.policy.scheduling.scheduler_state import (
    SchedulerState,
    SlotState,
    advance,
    begin_answer,
)
from tests.policy.scheduler_states import desk_of, ticket, turn

TPS = 200.0
SLOW = ThroughputModel(TPS, decode_s=0.09)
QUICK = ThroughputModel(TPS, decode_s=0.03)
PACE = PrefillPolicy()


def joined(n_prompts: list[int], priorities: dict[int, Priority] | None = None) -> SchedulerState:
    """Requests with prompts of these lengths, each in the slot of its place."""
    named = priorities or {}
    tickets = [
        ticket(str(i), float(i), named.get(i, Priority.NORMAL), n_prompt=n, pin=i)
        for i, n in enumerate(n_prompts)
    ]
    desk, _ = turn(desk_of(len(tickets), *tickets), limits=SchedulerLimits(max_active=len(tickets)))
    return desk


def order(desk: SchedulerState, speed: ThroughputModel) -> list[set[int]]:
    """Slots that get their first tokens in the same step, in order."""
    begun: list[set[int]] = []
    while True:
        desk, chunk = next_prefill_chunk(desk, speed, PACE)
        if not (chunk and chunk.is_awaited):
            running = [s for s in desk.slots if s.state is SlotState.RUNNING]
            begun.append({s.id for s in running if not s.has_token})
            for slot in running:
                desk = begin_answer(desk, slot.id)
        if chunk is None:
            return [slots for slots in begun if slots]
        assert chunk.n_tokens >= 1
        desk = advance(desk, chunk.slot, desk.slot(chunk.slot).position + chunk.n_tokens)


def test_newcomers_begin_to_decode_together_where_a_step_is_slow() -> None:
    assert order(joined([201] * 4), SLOW) == [{0, 1, 2, 3}]
    assert order(joined([201] * 4), QUICK) == [{0}, {1}, {2}, {3}]
    assert order(joined([201] * 4), ThroughputModel()) == [{0}, {1}, {2}, {3}]


def test_a_long_prompt_is_not_waited_for() -> None:
    assert order(joined([201, 20_001, 201]), SLOW) == [{0, 2}, {1}]


def with_image(desk: SchedulerState, slot: int, start: int, end: int) -> SchedulerState:
    """The prompt of a slot gets an image among its tokens."""
    request = desk.slot(slot).request
    assert request is not None
    tokens = (*request.tokens[:start], *[FIRST_VIRTUAL] * (end - start), *request.tokens[end:])
    span = ImageSpan(start, end, b"digest", size=ImageSize(32, 32, end - start, 1))
    seeing = msgspec.structs.replace(request, prompt=PromptTokens(tokens, (span,)))
    slots = [
        msgspec.structs.replace(one, request=seeing) if one.id == slot else one
        for one in desk.slots
    ]
    return msgspec.structs.replace(desk, slots=tuple(slots))


def test_images_are_not_waited_for() -> None:
    desk = joined([201] * 3)
    assert order(with_image(desk, 2, 20, 60), SLOW) == [{0, 1}, {2}]
    assert order(advance(with_image(desk, 2, 20, 60), 2, 60), SLOW) == [{0, 1, 2}]


def test_a_prompt_without_pixels_comes_after_the_others() -> None:
    desk = joined([101, 2001])
    for _ in range(20):
        desk, chunk = next_prefill_chunk(desk, QUICK, PACE, {"0"})
        assert chunk is not None and chunk.slot == 1
    _, chunk = next_prefill_chunk(desk, QUICK, PACE, {"0", "1"})
    assert chunk is not None and chunk.slot == 0, "the oldest one has been passed over"


def test_an_urgent_request_waits_for_no_other() -> None:
    assert order(joined([201, 201, 201], {1: Priority.HIGH}), SLOW)[0] == {1}


def test_an_urgent_prompt_is_waited_for() -> None:
    desk = advance(joined([201, 201], {1: Priority.HIGH}), 0, 200)
    assert order(desk, SLOW) == [{0, 1}]


def test_newcomers_beside_a_decoding_request_go_one_by_one() -> None:
    desk = begin_answer(advance(joined([2, 201, 201]), 0, 1), 0)
    assert order(desk, SLOW) == [{1}, {2}]


def test_a_request_that_comes_during_the_prefill_of_another_begins_with_it() -> None:
    desk = advance(joined([201]), 0, 200)
    first = desk.slot(0)
    late = joined([201, 201])
    desk = msgspec.structs.replace(late, slots=(first, late.slot(1)))
    assert order(desk, SLOW) == [{0, 1}]
    assert order(begin_answer(desk, 0), SLOW) == [{1}]


@given(
    st.lists(st.integers(2, 3000), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.floats(20.0, 5000.0),
    st.floats(0.0, 0.5),
    st.floats(0.0, 1e-3),
)
def test_who_has_a_token_waits_for_nobody_and_every_prompt_ends(
    n_prompts: list[int], begun: set[int], tps: float, decode_s: float, slowdown: float
) -> None:
    speed = ThroughputModel(tps, decode_s, slowdown)
    desk = joined(n_prompts)
    for _ in range(sum(n_prompts)):
        before = desk
        desk, chunk = next_prefill_chunk(desk, speed, PACE)
        if chunk is None:
            break
        slot = before.slot(chunk.slot)
        if chunk.is_awaited:
            assert 4 * decode_s > HEADROOM * PACE.max_stall_s
            assert prefill_s(speed, slot.position, slot.n_left) <= TOGETHER_S
            assert not any(s.has_token for s in before.slots)
        desk = advance(desk, chunk.slot, slot.position + chunk.n_tokens)
        if chunk.slot in begun and desk.slot(chunk.slot).state is SlotState.RUNNING:
            desk = begin_answer(desk, chunk.slot)
    assert all(s.state is SlotState.RUNNING for s in desk.slots)


@pytest.mark.parametrize("n_agents", [3, 4, 8])
@pytest.mark.parametrize("step_s", [0.07, 0.1, 0.15])
def test_first_tokens_come_sooner(
    n_agents: int, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has a fixed cost: that of a decode step, which a request long before has measured."""
    machine = SimulatedMachine(n_slots=n_agents, prefill_tps=TPS, pass_s=step_s, step_s=step_s)
    before = SimulatedAgent("before", (PlannedRequest(0.0, 300, 2),), Priority.HIGH)
    ask = PlannedRequest(60.0, 201, 128)
    agents = [before, *(SimulatedAgent(str(i), (ask,)) for i in range(n_agents))]

    waits: list[list[float]] = []

    def noted(samples: Sequence[SimulatedRequest], **measured: float) -> SimulationReport:
        waits.append([sample.ttft_s for sample in samples if sample.n_prompt == ask.n_prompt])
        return report_of(samples, **measured)

    monkeypatch.setattr("mlxstack.bench.dev.simulation.simulate.report_of", noted)
    simulate(agents, machine, SchedulerLimits())
    monkeypatch.setattr(scheduler, "awaited", lambda *_: [])
    simulate(agents, machine, SchedulerLimits())
    together, alone = waits
    assert len(together) == len(alone) == n_agents
    assert max(together) < max(alone)
    assert fmean(together) < fmean(alone)
