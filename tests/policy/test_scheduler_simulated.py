"""An hour of a thousand agents, against the real scheduler."""

from collections.abc import Iterator
from random import Random

import pytest

from mlxstack.bench.dev.simulation.report import SimulationReport
from mlxstack.bench.dev.simulation.simulate import SimulatedMachine, simulate
from mlxstack.bench.dev.simulation.workload import (
    PlannedRequest,
    SimulatedAgent,
    Workload,
    draw_agents,
)
from mlxstack.core.request import Priority
from mlxstack.policy.scheduling.scheduler import SchedulerLimits

MACHINE = SimulatedMachine(n_slots=8, prefill_tps=1500.0, slowdown=2e-5, step_s=0.020, row_s=0.002)
PATIENT = SchedulerLimits(max_active=8, max_waiting=2000)


def samples(seed: int = 7) -> Iterator[float]:
    random = Random(seed)
    while True:
        yield random.random()


def by_priority(report: SimulationReport) -> dict[Priority, float]:
    """The longest anybody of a priority waited for a seat, in seconds."""
    return {w.priority: w.waited.max for w in report.waits}


def test_a_thousand_agents_for_an_hour() -> None:
    agents = draw_agents(Workload(n_agents=1000, span_s=3600.0), samples())
    report = simulate(agents, MACHINE, PATIENT)
    assert report.span_s >= 3600
    assert report.n_asks == sum(len(agent.requests) for agent in agents), "everyone was answered"
    assert report.n_generated == sum(ask.n_answer for a in agents for ask in a.requests)
    assert report.longest_silence_s <= PATIENT.prefill.max_stall_s
    high, normal, low = report.waits
    assert high.waited.p95 < normal.waited.p95 < low.waited.p95
    # 20 s older than HIGH is as urgent as HIGH, so LOW never waits much longer than HIGH + 20 s.
    assert low.waited.max <= high.waited.max + 20 + 10


def test_e7_more_work_than_the_machine_can_do_still_serves_low() -> None:
    """Twice the load of the machine: the queue grows for the whole time, and nobody is left."""
    agents = draw_agents(Workload(n_agents=600, span_s=900.0, low=0.3, high=0.4), samples(8))
    report = simulate(agents, MACHINE, PATIENT)
    assert report.n_asks == sum(len(agent.requests) for agent in agents)
    assert report.longest_silence_s <= PATIENT.prefill.max_stall_s
    most = by_priority(report)
    assert most[Priority.LOW] <= most[Priority.HIGH] + 20 + 30


def test_e14_no_silence_while_long_prompts_at_all_positions_join() -> None:
    """Contexts up to 100k tokens, where prefill is six times slower than at the beginning."""
    long = Workload(
        n_agents=30, span_s=600.0, n_asks=(2, 5), n_head=20_000, n_new=(50, 20_000), pause_s=10.0
    )
    agents = draw_agents(long, samples(9))
    report = simulate(agents, SimulatedMachine(prefill_tps=2000.0, slowdown=5e-5), PATIENT)
    assert report.n_asks == sum(len(agent.requests) for agent in agents)
    assert report.longest_silence_s <= PATIENT.prefill.max_stall_s


@pytest.mark.parametrize("block_s", [0.005, 0.016, 0.056, 0.174])
def test_no_silence_while_an_image_joins(block_s: float) -> None:
    """27 blocks of a tower: 720p takes 16 ms each at 10 TFLOPS, 1080p 56, 4 megapixels 174."""
    talkers = [SimulatedAgent(f"talker {n}", (ask(200, n_answer=2000),)) for n in range(3)]
    image = SimulatedAgent("image", (PlannedRequest(3.0, 3000, 20, n_blocks=27),))
    machine = SimulatedMachine(block_s=block_s)
    report = simulate([*talkers, image], machine, SchedulerLimits())
    assert report.longest_silence_s <= PATIENT.prefill.max_stall_s
    assert report.busy_s == pytest.approx(report.span_s)


def test_an_image_alone_is_encoded_in_a_second_at_a_time() -> None:
    """The first block is measured; then as many as the patience of arrivals allows."""
    image = SimulatedAgent("image", (PlannedRequest(0.0, 2, 1, n_blocks=27),))
    alone = simulate([image], SimulatedMachine(block_s=0.1), SchedulerLimits())
    text = simulate([SimulatedAgent("text", (ask(2, n_answer=1),))], MACHINE, SchedulerLimits())
    assert alone.span_s - text.span_s == pytest.approx(2.7, abs=0.01)


def test_e18_refused_asks_come_back_and_are_served() -> None:
    agents = draw_agents(Workload(n_agents=100, span_s=60.0, n_asks=(1, 2)), samples(10))
    report = simulate(agents, MACHINE, SchedulerLimits(max_active=8, max_waiting=4))
    assert report.n_refused > 0
    assert report.n_asks == sum(len(agent.requests) for agent in agents)


def ask(n_prompt: int, after_s: float = 0.0, n_answer: int = 20) -> PlannedRequest:
    return PlannedRequest(after_s, n_prompt, n_answer)


def ttft(
    agents: list[SimulatedAgent], machine: SimulatedMachine = MACHINE
) -> dict[Priority, float]:
    report = simulate(agents, machine, SchedulerLimits())
    return {w.priority: w.ttft.max for w in report.waits}


def test_z7_a_short_turn_behind_a_cold_start() -> None:
    cold = SimulatedAgent("cold", (ask(4000),), Priority.NORMAL)
    short = SimulatedAgent("short", (ask(50, after_s=0.5),), Priority.HIGH)
    first_token = ttft([cold, short], SimulatedMachine(prefill_tps=1000.0))
    assert first_token[Priority.NORMAL] > 3.9
    assert first_token[Priority.HIGH] < 1.3, "one bite of a second, its own, and a step"


@pytest.mark.parametrize("n_short", [1, 50, 400])
def test_z7_a_cold_start_under_a_stream_of_short_turns_takes_four_times_as_long_at_most(
    n_short: int,
) -> None:
    cold = SimulatedAgent("cold", (ask(10_000),), Priority.LOW)
    stream = [
        SimulatedAgent(f"s{n}", (ask(400, after_s=0.2 * n, n_answer=1),), Priority.HIGH)
        for n in range(n_short)
    ]
    alone = ttft([cold])[Priority.LOW]
    assert ttft([cold, *stream])[Priority.LOW] <= 4.5 * alone


def test_b5_followers_find_their_own_seat_while_there_are_enough() -> None:
    agents = [SimulatedAgent(f"a{n}", (ask(500), ask(600, 5.0), ask(700, 5.0))) for n in range(8)]
    report = simulate(agents, MACHINE, SchedulerLimits())
    assert report.n_warm == 16
    assert report.n_computed == 8 * 500 + 16 * (100 - 20)


def test_b6_pinned_agents_queue_for_their_slot() -> None:
    agents = [SimulatedAgent(f"a{n}", (ask(100, n_answer=100),), pin=0) for n in range(3)]
    report = simulate(agents, MACHINE, SchedulerLimits())
    step = MACHINE.decode_s(1)
    assert report.waits[0].waited.max == pytest.approx(2 * (99 / 1500 + 100 * step), rel=0.01)


def test_e1_batching_is_worth_it() -> None:
    """Eight answers together against one after the other."""
    agents = [SimulatedAgent(f"a{n}", (ask(2, n_answer=200),)) for n in range(8)]
    together = simulate(agents, MACHINE, SchedulerLimits(max_active=8))
    alone = simulate(agents, MACHINE, SchedulerLimits(max_active=1))
    expected = 8 * MACHINE.decode_s(1) / MACHINE.decode_s(8)
    assert together.tps / alone.tps == pytest.approx(expected, rel=0.05)


def test_idle_time_is_skipped() -> None:
    report = simulate(
        [SimulatedAgent("a", (ask(10), ask(10, after_s=1e6)))], MACHINE, SchedulerLimits()
    )
    assert report.span_s > 1e6
    assert report.busy_s < 2


def test_nobody_asks() -> None:
    report = simulate([], MACHINE, SchedulerLimits())
    assert (report.n_asks, report.tps, report.waits) == (0, 0.0, ())


def test_the_same_samples_give_the_same_hour() -> None:
    few = Workload(n_agents=20, span_s=60.0)
    one, other = (
        simulate(draw_agents(few, samples(3)), MACHINE, SchedulerLimits()) for _ in range(2)
    )
    assert one == other


def test_a_workload_is_what_it_says() -> None:
    workload = Workload(n_agents=400, span_s=100.0, n_asks=(2, 3), high=0.25, low=0.25)
    agents = draw_agents(workload, samples())
    assert {len(a.requests) for a in agents} == {2, 3}
    assert all(0 <= a.requests[0].after_s < 100 for a in agents)
    shares = [sum(a.priority is p for a in agents) / 400 for p in Priority]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.07)
    for agent in agents:
        prompts = [a.n_prompt for a in agent.requests]
        assert prompts == sorted(set(prompts)), "each ask contains the ones before"
        assert all(2000 <= a.n_cached < a.n_prompt for a in agent.requests)
