"""`bench dev head`: rows on a common prefix, shared or not."""

from msgspec import Struct

from mlxstack.bench.dev.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.dev.sandbox import Sandbox, measure
from mlxstack.bench.dev.trials import BenchResult, Forks, SharedRows
from mlxstack.bench.statistics import lasting, megabytes, ratio, spread

NAMES = ("team", "pair", "strangers", "fork")
MOST_GROWTH = 1.5
"""Tolerated growth of fork time with prefix length: millisecond noise."""


class HeadPlan(Struct, frozen=True):
    """Teams as (rows, shared tokens, own tokens); `forks` are lengths of prefixes."""

    team: tuple[int, int, int] = (8, 4000, 200)
    pair: tuple[int, int, int] = (2, 500, 200)
    strangers: tuple[int, int, int] = (8, 0, 1000)
    forks: tuple[int, ...] = (1024, 4096, 16384)
    n_steps: int = 20
    passes: int = 3


SMALL = HeadPlan((4, 1152, 16), (2, 64, 16), (2, 0, 32), (1024, 2048), 5, 1)


def run(stage: Sandbox, plan: HeadPlan) -> Results:
    """All teams in one process, the sides by turns."""
    stage.say("rows on a common prefix")
    teams = (plan.team, plan.pair, plan.strangers)
    trials = [SharedRows(*team, n_steps=plan.n_steps, passes=plan.passes) for team in teams]
    *found, forks = measure(stage, [*trials, Forks(plan.forks, passes=plan.passes)])
    heads = ("Rows", "Shared", "Own", "KV off", "KV on", "Step off", "Step on", "Step theirs")
    rows = tuple(
        (
            *map(str, team),
            megabytes(one.of("off", "bytes")[0]),
            megabytes(one.of("on", "bytes")[0]),
            *(lasting(one.of(who, "step_s")) for who in ("off", "on", "theirs")),
        )
        for team, one in zip(teams, found, strict=True)
    )
    note = "KV is what MLX's active memory grew by; a step makes one token for every row."
    copied = tuple(
        (str(n), megabytes(forks.of(str(n), "bytes")[0]), lasting(forks.of(str(n), "fork_s")))
        for n in plan.forks
    )
    return Results(
        (
            ReportTable("A common prefix", heads, rows, note),
            ReportTable(
                "A fork under a shared prefix",
                ("Shared", "Bytes", "Time"),
                copied,
                "Another row with 200 tokens of its own. Measured at load, sharing pays from "
                f"{forks.of('policy', 'least shared tokens')[0]:.0f} tokens on (0: never).",
            ),
        ),
        _targets(plan, found, forks),
        {
            f"{name}: {one.who} {one.what}": one.values
            for name, each in zip(NAMES, (*found, forks), strict=True)
            for one in each.samples
        },
    )


def _targets(
    plan: HeadPlan, found: list[BenchResult], forks: BenchResult
) -> tuple[BenchTarget, ...]:
    team, pair, strangers = found
    n_bytes = ratio(team.of("on", "bytes")[0], team.of("off", "bytes")[0])
    medians = [spread(forks.of(str(n), "fork_s")).median for n in plan.forks]
    return (
        at_most("a team: live KV, against off", n_bytes, 0.25),
        at_most("a team: step, against off", 1 / _speedup(team, "off"), 0.6),
        at_most("a team: step, against theirs", 1 / _speedup(team, "theirs"), 0.6),
        at_least("a pair: speed, against off", _speedup(pair, "off"), 0.98),
        at_least("nothing shared: speed, against off", _speedup(strangers, "off"), 0.99),
        at_most("a fork: longest prefix, against shortest", medians[-1] / medians[0], MOST_GROWTH),
    )


def _speedup(found: BenchResult, other: str) -> float:
    """Median speedup of the passes, each measuring all sides."""
    each = zip(found.of(other, "step_s"), found.of("on", "step_s"), strict=True)
    return spread([ratio(theirs, on) for theirs, on in each]).median
