"""`bench dev simulate`: a scenario of agents and hardware, and how long its requests wait."""

import random
from pathlib import Path

from msgspec import Struct

from mlxstack.bench.dev.simulation.report import Percentiles, SimulationReport
from mlxstack.bench.dev.simulation.simulate import SimulatedMachine, simulate
from mlxstack.bench.dev.simulation.workload import Workload, draw_agents
from mlxstack.bench.report import ReportTable, Results
from mlxstack.config.presets import read_struct
from mlxstack.core.errors import SetupError
from mlxstack.policy.scheduling.scheduler import SchedulerLimits

CODING_AGENTS = Workload(n_agents=6, span_s=60.0, n_asks=(20, 40), pause_s=5.0)
"""Agents with a tool call or two between requests."""

HEADS = ("Priority", "Requests", "Slot p50", "p95", "max", "First token p50", "p95", "max")


class Scenario(Struct, frozen=True):
    """Simulated load and machine."""

    machine: SimulatedMachine = SimulatedMachine()
    workload: Workload = CODING_AGENTS
    limits: SchedulerLimits = SchedulerLimits()
    seed: int = 0
    """Equal seeds draw equal agents."""


def read_scenario(file: Path) -> Scenario:
    """Scenario of a YAML file. Raises SetupError naming the key and its line."""
    scenario = read_struct(file.expanduser().absolute(), Scenario)
    for key in ("n_asks", "n_new", "n_answer"):
        low, high = getattr(scenario.workload, key)
        if low > high:
            raise SetupError(f"{file}: workload.{key} is [{low}, {high}], but least comes first")
    return scenario


def run(scenario: Scenario) -> Results:
    """Simulate a scenario to its end."""
    source = random.Random(scenario.seed)
    agents = draw_agents(scenario.workload, iter(source.random, None))
    return results(scenario, simulate(agents, scenario.machine, scenario.limits))


def results(scenario: Scenario, report: SimulationReport) -> Results:
    """Waits by priority, and the totals."""
    machine = scenario.machine
    note = (
        f"{scenario.workload.n_agents} agents, {machine.n_slots} slots, prefill "
        f"{machine.prefill_tps:.0f} tokens/s, a decode step {machine.step_s * 1000:.1f} ms and "
        f"{machine.row_s * 1000:.1f} ms for each row. Seconds until a slot, and until the first "
        "token"
    )
    waits = tuple(
        (wait.priority.name, str(wait.n_asks), *_texts(wait.waited), *_texts(wait.ttft))
        for wait in report.waits
    )
    n_reused = report.n_prompt - report.n_computed
    totals = (
        ("requests", str(report.n_asks)),
        ("time, of it busy", f"{report.span_s:.0f} s, {report.busy_s:.0f} s"),
        ("tokens/s while busy", f"{report.tps:.0f}"),
        ("prompt tokens reused", f"{n_reused / max(1, report.n_prompt):.0%} of {report.n_prompt}"),
        ("requests that found their own slot warm", str(report.n_warm)),
        ("requests that met a full queue", str(report.n_refused)),
        ("longest silence", f"{report.longest_silence_s:.2f} s"),
    )
    return Results(
        (
            ReportTable("Waiting times", HEADS, waits, note),
            ReportTable("Totals", ("Total", "Value"), totals),
        )
    )


def _texts(percentiles: Percentiles) -> tuple[str, str, str]:
    return f"{percentiles.p50:.2f}", f"{percentiles.p95:.2f}", f"{percentiles.max:.2f}"
