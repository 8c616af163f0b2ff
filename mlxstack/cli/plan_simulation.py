"""`plan --simulate`: simulated agents and hardware through the real scheduler."""

import random
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from mlxstack.cli.output import say, table
from mlxstack.config.presets import read_struct
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import Preset
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, limits_of
from mlxstack.policy.simulation.report import Percentiles, SimulationReport
from mlxstack.policy.simulation.simulate import SimulatedMachine, simulate
from mlxstack.policy.simulation.workload import Workload, draw_agents

WORK = Workload(span_s=60.0, n_asks=(20, 40), pause_s=5.0)
"""Concurrent coding agents, with a tool call or two between requests."""

HEADS = ("PRIORITY", "REQUESTS", "SLOT P50", "P95", "MAX", "FIRST TOKEN P50", "P95", "MAX")


class Scenario(Struct, frozen=True):
    """Simulated load and machine; the same `seed` draws the same agents."""

    machine: SimulatedMachine = SimulatedMachine()
    workload: Workload = Workload()
    limits: SchedulerLimits = SchedulerLimits()
    seed: int = 0


class Outcome(Struct, frozen=True):
    """Scenario and its outcome; `tps`: generated tokens per working second."""

    scenario: Scenario
    report: SimulationReport
    tps: float


def read_scenario(name: str) -> Scenario:
    """From a YAML file. Raises SetupError naming the key and its line."""
    scenario = read_struct(Path(name).expanduser().absolute(), Scenario)
    for key in ("n_asks", "n_new", "n_answer"):
        least, most = getattr(scenario.workload, key)
        if least > most:
            raise SetupError(f"{name}: workload.{key} is [{least}, {most}], but least comes first")
    return scenario


def at_work(scenario: Scenario, n_agents: int) -> Scenario:
    """Scenario with `n_agents` coding agents at work."""
    return replace(scenario, workload=replace(WORK, n_agents=n_agents))


def served_by(scenario: Scenario, preset: Preset) -> Scenario:
    """Scenario with the slots and limits of a preset."""
    machine = replace(scenario.machine, n_slots=preset.slots.count)
    return replace(scenario, machine=machine, limits=limits_of(preset, None))


def as_fast_as(scenario: Scenario, metrics: str) -> Scenario:
    """Machine with the speeds at a service's /metrics. Raises SetupError.

    A step is split into its fixed part and its rows as `SimulatedMachine` does by default.
    """
    families = text_string_to_metric_families(metrics)
    of = {one.name: one.value for family in families for one in family.samples}
    n_steps = of.get("llamacpp:n_decode_total", 0.0)
    prompt_s = of.get("llamacpp:prompt_seconds_total", 0.0)
    if not (n_steps and prompt_s):
        raise SetupError("no speed measurements yet; send the service a request first")
    step_s = of["llamacpp:tokens_predicted_seconds_total"] / n_steps
    share = SimulatedMachine().row_s / SimulatedMachine().step_s
    fixed_s = step_s / (1 + share * of["mlxstack_decode_rows_total"] / n_steps)
    machine = replace(
        scenario.machine,
        prefill_tps=of["llamacpp:prompt_tokens_total"] / prompt_s,
        step_s=fixed_s,
        row_s=fixed_s * share,
    )
    return replace(scenario, machine=machine)


def outcome(scenario: Scenario) -> Outcome:
    """Run the simulation to completion."""
    source = random.Random(scenario.seed)
    agents = draw_agents(scenario.workload, iter(source.random, None))
    report = simulate(agents, scenario.machine, scenario.limits)
    return Outcome(scenario, report, report.tps)


def show_outcome(found: Outcome) -> None:
    """The waits by priority, and the totals."""
    report = found.report
    scenario = found.scenario
    say(
        f"{scenario.workload.n_agents} agents, {scenario.machine.n_slots} slots: "
        f"{report.n_asks} requests in {report.span_s:.0f} s, "
        f"the machine busy for {report.busy_s:.0f} s"
    )
    machine = scenario.machine
    say(
        f"prefill {machine.prefill_tps:.0f} tokens/s, a decode step {machine.step_s * 1000:.1f} ms "
        f"and {machine.row_s * 1000:.1f} ms for each row; "
        "seconds until a slot, and until the first token:"
    )
    waits = [(w.priority.name, w.n_asks, *_texts(w.waited), *_texts(w.ttft)) for w in report.waits]
    table(HEADS, waits)
    reused = 1 - report.n_computed / report.n_prompt if report.n_prompt else 0.0
    say(
        f"{found.tps:.0f} tokens/s while busy; {reused:.0%} of {report.n_prompt} prompt tokens "
        f"reused; {report.n_warm} requests found their own slot warm; "
        f"{report.n_refused} met a full queue; longest silence {report.longest_silence_s:.2f} s"
    )


def _texts(spread: Percentiles) -> tuple[str, str, str]:
    return f"{spread.p50:.2f}", f"{spread.p95:.2f}", f"{spread.most:.2f}"
