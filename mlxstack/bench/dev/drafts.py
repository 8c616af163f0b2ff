"""`bench drafts`: the whole engine with speculative decoding and without, by turns."""

from msgspec import Struct

from mlxstack.bench.dev.sandbox import Sandbox, measure
from mlxstack.bench.dev.trials import BenchResult, Drafts
from mlxstack.bench.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.statistics import lasting, ratio, spread, times

TEXTS = ("copied", "schema", "prose", "adversarial")
ALL_BUT_NOTHING = 0.98


class DraftsPlan(Struct, frozen=True):
    """Every text is written by every number of `rows` at once."""

    rows: tuple[int, ...] = (1, 4)
    n_prompt: int = 600
    n_tokens: int = 400
    passes: int = 3


SMALL = DraftsPlan((1, 2), 60, 60, 1)


def run(stage: Sandbox, plan: DraftsPlan) -> Results:
    """All texts; both engines live in one process, so that other load meets both."""
    stage.say("the whole engine, with drafts and without")
    trials = [
        Drafts(text, n, plan.n_prompt, plan.n_tokens, plan.passes)
        for text in TEXTS
        for n in plan.rows
    ]
    found = dict(zip(trials, measure(stage, trials), strict=True))
    rows = tuple(
        (
            trial.text,
            str(trial.n_rows),
            lasting(one.of("off", "token_s")),
            lasting(one.of("on", "token_s")),
            times(_speedup(one)),
            times(_passes(one)),
        )
        for trial, one in found.items()
    )
    heads = ("Text", "Agents", "Token without", "Token with", "Speedup", "Passes")
    note = "Copied: 40 tokens of the prompt and 4 others by turns. Adversarial: 6 and 3."
    return Results(
        (ReportTable("Speculative decoding", heads, rows, note),),
        tuple(_target(trial, one) for trial, one in found.items()),
        {
            f"{trial.text} x {trial.n_rows}: {one.who} {one.what}": one.values
            for trial, finding in found.items()
            for one in finding.samples
        },
    )


def _target(trial: Drafts, found: BenchResult) -> BenchTarget:
    name = f"{trial.text}, {trial.n_rows} at once"
    if trial.text == "schema":
        return at_most(f"{name}: passes, against without", _passes(found), 0.5)
    bound = ALL_BUT_NOTHING
    if trial.text == "copied":
        bound = 1.8 if trial.n_rows == 1 else 1.3
    return at_least(f"{name}: speed, against without", _speedup(found), bound)


def _speedup(found: BenchResult) -> float:
    """The median over the passes, each of which measures both sides one after the other."""
    each = zip(found.of("off", "token_s"), found.of("on", "token_s"), strict=True)
    return spread([ratio(off, on) for off, on in each]).median


def _passes(found: BenchResult) -> float:
    return ratio(sum(found.of("on", "passes")), sum(found.of("off", "passes")))
