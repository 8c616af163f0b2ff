"""`bench dev text`: text work of a next turn, against cold."""

from msgspec import Struct

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.trials import BenchResult, FollowUp
from mlxstack.bench.report import ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import lasting, ratio, spread, times


class TextPlan(Struct, frozen=True):
    """Lengths of histories in tokens; the target holds for the longest."""

    histories: tuple[int, ...] = (10_000, 100_000)
    passes: int = 3


SMALL = TextPlan((500, 3_000), 3)


def run(stage: Sandbox, plan: TextPlan) -> Results:
    """Template, tokens and block keys: from scratch, and for the next turn."""
    stage.say("prompts of long histories")
    measured = measure(stage, [FollowUp(n, plan.passes) for n in plan.histories])
    rows = tuple(
        (
            f"{n:,}",
            lasting(_total(result, "scratch")),
            lasting(result.of("next", "prompt_s")),
            lasting(result.of("next", "hash_s")),
            lasting(_total(result, "next")),
            times(_share(result)),
        )
        for n, result in zip(plan.histories, measured, strict=True)
    )
    heads = ("History", "From scratch", "Next: prompt", "Next: keys", "Next turn", "Share")
    note = "Template and tokens of the whole conversation, and the chain of its block keys."
    longest = f"next turn on {plan.histories[-1]:,} tokens, against from scratch"
    return Results(
        (ReportTable("Text work per request", heads, rows, note),),
        (at_most(longest, _share(measured[-1]), 0.2),),
        {
            f"{n}: {sample.who} {sample.quantity}": sample.values
            for n, finding in zip(plan.histories, measured, strict=True)
            for sample in finding.samples
        },
    )


def _total(result: BenchResult, who: str) -> tuple[float, ...]:
    return tuple(map(sum, zip(result.of(who, "prompt_s"), result.of(who, "hash_s"), strict=True)))


def _share(result: BenchResult) -> float:
    return ratio(spread(_total(result, "next")).median, spread(_total(result, "scratch")).median)
