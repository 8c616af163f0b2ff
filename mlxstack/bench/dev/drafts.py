"""`bench drafts`: the whole engine with speculative decoding and without, by turns."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.trials import BenchResult, Drafts
from mlxstack.bench.dev.workload import CHECKOUT
from mlxstack.bench.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import lasting, ratio, spread, times

TEXTS = ("copied", "schema", "prose", "adversarial")
ALL_BUT_NOTHING = 0.98
MAX_GAP = 1.05
"""Tolerated share of longer token gaps with drafts: percentile noise."""


class DraftsPlan(Struct, frozen=True):
    """Draft benchmark: texts by number of `rows`, with decoding neighbors.

    Of a model that knows text they are `asked`.
    """

    rows: tuple[int, ...] = (1, 4)
    n_prompt: int = 200
    n_tokens: int = 132
    passes: int = 3
    asked: dict[str, str] = {}
    draft: str | None = None
    """Draft model or drafter, where the model is to have one."""

    @property
    def scenes(self) -> dict[str, tuple[str, ...]]:
        """The texts of each scene, one per row."""
        mixes = {f"{text} x {n}": (text,) * n for text in TEXTS for n in self.rows}
        return {**mixes, "prose x 3": ("prose",) * 3, "mixed": ("copied", "prose", "prose")}


SMALL = DraftsPlan((1, 2), 60, 60, 1)
RULED = ("calls",)
"""Texts that are answered under a schema, as a tool call is."""


def on_real_text(plan: DraftsPlan) -> DraftsPlan:
    """Plan for prose, an edit of code, and calls."""
    code = (CHECKOUT / "mlxstack/features/row_stacks/policy.py").read_text("utf-8")
    asked = {
        "prose": "Write a long story about a dragon who counts the stones of a river.",
        "edit": f"Write this code again, with `rows` renamed to `agents`:\n\n```python\n{code}```",
        "calls": "Edit the file notes.txt: replace `river` by `sea`, once.",
    }
    rows = tuple(sorted({*plan.rows, 2}))
    return replace(plan, rows=rows, n_prompt=len(code), asked=asked)


def run_on_text(stage: Sandbox, plan: DraftsPlan) -> Results:
    """Drafts, `auto` against off, on real text."""
    stage.say("the whole engine, with drafts: auto and off")
    scenes = {f"{text} x {n}": (text,) * n for text in plan.asked for n in plan.rows}
    trial = Drafts(
        scenes,
        plan.n_prompt,
        plan.n_tokens,
        plan.passes,
        asked=plan.asked,
        ruled=RULED,
        draft=plan.draft,
    )
    result = measure(stage, [trial])[0]
    columns: tuple[str, ...] = ("Scene", "Token off", "Token auto", "Speedup", "Passes", "Accepted")
    note = "A story, a rename in code, the arguments of a call; greedy, agents at once."
    rows = tuple(_row(result, scene) for scene in scenes)
    if plan.draft is not None:
        columns = (*columns, "Of the model")
        note += " The last column counts those of the draft model among them."
        pairs = zip(rows, scenes, strict=True)
        rows = tuple((*row, _share(result, scene, "model_")) for row, scene in pairs)
    worst = min(_speedup(result, scene) for scene in scenes)
    return Results(
        (ReportTable("`speculation: auto` on real text", columns, rows, note),),
        (at_least("worst scene, against off", worst, ALL_BUT_NOTHING),),
        {f"{sample.who} {sample.quantity}": sample.values for sample in result.samples},
    )


def _row(result: BenchResult, scene: str) -> tuple[str, ...]:
    return (
        scene,
        lasting(result.of("off", f"{scene}: token_s")),
        lasting(result.of("on", f"{scene}: token_s")),
        times(_speedup(result, scene)),
        times(_passes(result, scene)),
        _share(result, scene),
    )


def _share(result: BenchResult, scene: str, source: str = "") -> str:
    """Accepted tokens of those that were drafted."""
    accepted = _sum(result, scene, f"{source}accepted")
    return f"{accepted:.0f} of {_sum(result, scene, f'{source}drafted'):.0f}"


def run(stage: Sandbox, plan: DraftsPlan) -> Results:
    """Run all scenes, with both engines in one process."""
    stage.say("the whole engine, with drafts and without")
    trial = Drafts(plan.scenes, plan.n_prompt, plan.n_tokens, plan.passes)
    result = measure(stage, [trial])[0]
    rows = tuple(
        (*_row(result, scene), times(_gap(result, scene)) if "prose" in texts else "-")
        for scene, texts in plan.scenes.items()
    )
    heads = ("Scene", "Token without", "Token with", "Speedup", "Passes", "Accepted", "p99 gap")
    note = (
        "Copied: 40 tokens of the prompt and 4 others by turns. Adversarial: 6 and 3. Mixed: one "
        "copies, two write prose. The gap is that between two tokens of prose."
    )
    return Results(
        (ReportTable("Speculative decoding", heads, rows, note),),
        tuple(_target(result, scene, texts) for scene, texts in plan.scenes.items()),
        {f"{sample.who} {sample.quantity}": sample.values for sample in result.samples},
    )


def _target(result: BenchResult, scene: str, texts: tuple[str, ...]) -> BenchTarget:
    if scene == "prose x 3":
        return at_most(f"{scene}: p99 gap, against without", _gap(result, scene), MAX_GAP)
    if texts[0] == "schema":
        return at_most(f"{scene}: passes, against without", _passes(result, scene), 0.5)
    bound = ALL_BUT_NOTHING
    if set(texts) == {"copied"}:
        bound = 1.8 if len(texts) == 1 else 1.3
    return at_least(f"{scene}: speed, against without", _speedup(result, scene), bound)


def _speedup(result: BenchResult, scene: str) -> float:
    return _ratio(result, f"{scene}: token_s")


def _gap(result: BenchResult, scene: str) -> float:
    return 1 / _ratio(result, f"{scene}: gap_s")


def _ratio(result: BenchResult, quantity: str) -> float:
    """Median ratio of the passes, each measuring both sides."""
    pairs = zip(result.of("off", quantity), result.of("on", quantity), strict=True)
    return spread([ratio(off, on) for off, on in pairs]).median


def _passes(result: BenchResult, scene: str) -> float:
    quantity = f"{scene}: passes"
    return ratio(sum(result.of("on", quantity)), sum(result.of("off", quantity)))


def _sum(result: BenchResult, scene: str, quantity: str) -> float:
    return sum(result.of("on", f"{scene}: {quantity}"))
