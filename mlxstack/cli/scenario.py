"""`plan --simulate`: imagined agents on imagined hardware, through the real scheduler."""

import random
from pathlib import Path

import msgspec
import msgspec.inspect
import typer
from msgspec import Struct

from mlxstack.cli.show import table
from mlxstack.core.errors import SetupError
from mlxstack.host import shape
from mlxstack.host.marked import dotted, read_yaml
from mlxstack.policy.report import Report, table_of
from mlxstack.policy.scheduler import Limits
from mlxstack.policy.simulate import Machine, simulate
from mlxstack.policy.workload import Workload, draw_agents

DEFAULTS = "defaults"


class Scenario(Struct, frozen=True):
    """What is played; the same `seed` draws the same agents."""

    machine: Machine = Machine()
    workload: Workload = Workload()
    limits: Limits = Limits()
    seed: int = 0


class Outcome(Struct, frozen=True):
    """A scenario and what came of it; `tps` is generated tokens per second of work."""

    scenario: Scenario
    report: Report
    tps: float


def read_scenario(name: str) -> Scenario:
    """From a YAML file, or `defaults`. Raises SetupError naming the key and its line."""
    if name == DEFAULTS:
        return Scenario()
    document = read_yaml(Path(name).expanduser().absolute())
    form = msgspec.inspect.type_info(Scenario)
    for keys in shape.unknown(document.values, form):
        near = shape.suggestion(str(keys[-1]), shape.children(shape.at(keys[:-1], form) or form))
        raise SetupError(f"{document.mark(keys)}: unknown key `{dotted(keys)}`{near}")
    try:
        return msgspec.convert(document.values, Scenario)
    except msgspec.ValidationError as why:
        raise SetupError(f"{name}: {why}") from why


def outcome(scenario: Scenario) -> Outcome:
    """Play it to its end."""
    source = random.Random(scenario.seed)
    agents = draw_agents(scenario.workload, iter(source.random, None))
    report = simulate(agents, scenario.machine, scenario.limits)
    return Outcome(scenario, report, report.tps)


def show_outcome(found: Outcome) -> None:
    """The waits by priority, and the totals."""
    report, scenario = found.report, found.scenario
    typer.echo(
        f"{scenario.workload.n_agents} agents, {scenario.machine.n_slots} slots: "
        f"{report.n_asks} asks in {report.span_s:.0f} s, the machine busy for {report.busy_s:.0f} s"
    )
    drawn = table_of(report)
    table([head.upper() for head in drawn.head], drawn.rows)
    reused = 1 - report.n_computed / report.n_prompt if report.n_prompt else 0.0
    typer.echo(
        f"{found.tps:.0f} tokens/s while busy; {reused:.0%} of {report.n_prompt} prompt tokens "
        f"reused; {report.n_warm} asks found their own seat warm; {report.n_refused} met a full "
        f"queue; longest silence {report.longest_silence_s:.2f} s"
    )
