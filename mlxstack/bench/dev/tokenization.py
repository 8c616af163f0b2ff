"""`bench dev text`: text work of a next turn, against cold."""

from msgspec import Struct

from mlxstack.bench.dev.report import ReportTable, Results, at_most
from mlxstack.bench.dev.sandbox import Sandbox, measure
from mlxstack.bench.dev.trials import BenchResult, FollowUp
from mlxstack.bench.statistics import lasting, ratio, spread, times


class TextPlan(Struct, frozen=True):
    """Lengths of histories in tokens; the target holds for the longest."""

    histories: tuple[int, ...] = (10_000, 100_000)
    passes: int = 3


SMALL = TextPlan((500, 3_000), 3)


def run(stage: Sandbox, plan: TextPlan) -> Results:
    """Template, tokens and block keys: from scratch, and for the next turn."""
    stage.say("prompts of long histories")
    found = measure(stage, [FollowUp(n, plan.passes) for n in plan.histories])
    rows = tuple(
        (
            f"{n:,}",
            lasting(_total(one, "scratch")),
            lasting(one.of("next", "prompt_s")),
            lasting(one.of("next", "hash_s")),
            lasting(_total(one, "next")),
            times(_share(one)),
        )
        for n, one in zip(plan.histories, found, strict=True)
    )
    heads = ("History", "From scratch", "Next: prompt", "Next: keys", "Next turn", "Share")
    note = "Template and tokens of the whole conversation, and the chain of its block keys."
    longest = f"next turn on {plan.histories[-1]:,} tokens, against from scratch"
    return Results(
        (ReportTable("Text work per request", heads, rows, note),),
        (at_most(longest, _share(found[-1]), 0.2),),
        {
            f"{n}: {one.who} {one.what}": one.values
            for n, finding in zip(plan.histories, found, strict=True)
            for one in finding.samples
        },
    )


def _total(found: BenchResult, who: str) -> tuple[float, ...]:
    return tuple(map(sum, zip(found.of(who, "prompt_s"), found.of(who, "hash_s"), strict=True)))


def _share(found: BenchResult) -> float:
    return ratio(spread(_total(found, "next")).median, spread(_total(found, "scratch")).median)
