"""Admission by working set, simulated: who is admitted, what leaves memory, what it costs."""

from pathlib import Path

import msgspec
import pytest

from mlxstack.bench.dev.simulation.simulate import SimulatedMachine
from mlxstack.bench.dev.simulation.working_sets import (
    MACHINES,
    RUN_PAUSE_S,
    SHARES,
    KVMemory,
    KVTiers,
    SimulatedRun,
    TraceStep,
    WorkingSetSimulation,
    admitted,
    compared,
    recorded_agents,
    traced_agents,
)
from mlxstack.bench.dev.simulation.workload import PlannedRequest, SimulatedAgent

MACHINE = SimulatedMachine(n_slots=4, prefill_tps=1000.0, step_s=0.02, row_s=0.002)


def agent(name: str, n_turns: int = 6, pause_s: float = 1.0) -> SimulatedAgent:
    """An agent whose context grows from 8,000 tokens by 100 a turn."""
    sizes = [8000 + 100 * i for i in range(n_turns)]
    known = [0, *(size + 20 for size in sizes)]
    turns = (
        PlannedRequest(pause_s, size, 20, n_known)
        for size, n_known in zip(sizes, known, strict=False)
    )
    return SimulatedAgent(name, tuple(turns))


def run(*agents: SimulatedAgent, is_admitting: bool, **tiers: float) -> SimulatedRun:
    kv_tiers = msgspec.convert({"restore_tps": 0.0, **tiers}, KVTiers)
    return WorkingSetSimulation(agents, MACHINE, kv_tiers, is_admitting=is_admitting).run()


def test_agents_are_admitted_in_order_until_one_does_not_fit() -> None:
    runs = {"a": 60, "b": 30, "c": 20, "d": 5}
    assert admitted(runs, 115) == {"a", "b", "c", "d"}
    assert admitted(runs, 100) == {"a", "b"}, "a smaller one behind it would starve the large one"
    assert admitted(runs, 10) == {"a"}, "the first one always runs"
    assert admitted({}, 10) == frozenset()


def test_the_end_of_the_context_that_was_not_used_for_longest_leaves_memory() -> None:
    contexts = KVMemory(100)
    contexts.hold("a", 50, ())
    contexts.hold("b", 40, ())
    contexts.hold("c", 30, ())
    assert [contexts.n_resident(name) for name in "abc"] == [30, 40, 30]
    contexts.hold("c", 60, {"a"})
    assert [contexts.n_resident(name) for name in "abc"] == [30, 10, 60]


def test_agents_that_evict_each_other_compute_their_contexts_at_each_turn_without_a_disk() -> None:
    team = [agent(name) for name in "abc"]
    free = run(*team, is_admitting=False, memory_tokens=12_000)
    held = run(*team, is_admitting=True, memory_tokens=12_000)
    n_first = sum(each.requests[0].n_prompt for each in team)
    assert free.n_computed > 3 * n_first
    assert held.n_computed < 1.1 * n_first
    assert max(held.session_s) < 0.5 * max(free.session_s)


def test_a_disk_tier_reads_what_would_have_been_computed() -> None:
    team = [agent(name) for name in "abc"]
    tiers = {"memory_tokens": 12_000, "restore_tps": 20_000.0}
    free = run(*team, is_admitting=False, **tiers)
    n_new = sum(each.requests[-1].n_prompt for each in team)
    assert free.n_computed < n_new
    assert free.n_restored > 2 * n_new
    slow = run(*team, is_admitting=False, **{**tiers, "restore_tps": 500.0})
    assert max(slow.session_s) > max(free.session_s)


def test_admission_changes_nothing_where_all_working_sets_fit() -> None:
    team = [agent(name) for name in "abc"]
    runs = [run(*team, is_admitting=on, memory_tokens=30_000) for on in (False, True)]
    assert runs[0] == runs[1]
    assert not runs[0].n_restored


def test_a_pause_gives_the_place_to_the_next_agent() -> None:
    """Both sessions take little longer than their pauses, which lie side by side."""
    team = [agent(name, n_turns=3, pause_s=RUN_PAUSE_S) for name in "ab"]
    held = run(*team, is_admitting=True, memory_tokens=9_000, restore_tps=20_000.0)
    alone = run(team[0], is_admitting=True, memory_tokens=9_000, restore_tps=20_000.0)
    assert max(held.session_s) < 1.5 * max(alone.session_s)


@pytest.mark.parametrize("share", SHARES)
def test_every_recorded_session_ends(share: float) -> None:
    row = compared(recorded_agents(4), MACHINES[0], share)
    assert row[:3] == ("M1", "19,728 tokens/s", f"{share:g} x")


def test_a_trace_becomes_prompts_and_pauses(tmp_path: Path) -> None:
    steps = (TraceStep(101.0, 1.0, 2.0, 500, 30), TraceStep(105.5, 0.5, 1.0, 700, 0))
    (tmp_path / "one.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(steps))
    (traced,) = traced_agents(tmp_path, 8)
    assert traced == SimulatedAgent(
        "one", (PlannedRequest(0.0, 500, 30, 0), PlannedRequest(2.0, 700, 1, 530))
    )
