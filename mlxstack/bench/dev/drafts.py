"""`bench drafts`: the whole engine with speculative decoding and without, by turns."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.dev.report import BenchTarget, ReportTable, Results, at_least, at_most
from mlxstack.bench.dev.sandbox import Sandbox, measure
from mlxstack.bench.dev.trials import BenchResult, Drafts
from mlxstack.bench.dev.workload import CHECKOUT
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

    @property
    def scenes(self) -> dict[str, tuple[str, ...]]:
        """The texts of each scene, one per row."""
        each = {f"{text} x {n}": (text,) * n for text in TEXTS for n in self.rows}
        return {**each, "prose x 3": ("prose",) * 3, "mixed": ("copied", "prose", "prose")}


SMALL = DraftsPlan((1, 2), 60, 60, 1)
RULED = ("calls",)
"""Texts that are answered under a schema, as a tool call is."""


def on_real_text(plan: DraftsPlan) -> DraftsPlan:
    """Plan for prose, an edit of code, and calls."""
    code = (CHECKOUT / "mlxstack/policy/scheduling/row_stacking.py").read_text("utf-8")
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
    trial = Drafts(scenes, plan.n_prompt, plan.n_tokens, plan.passes, asked=plan.asked, ruled=RULED)
    found = measure(stage, [trial])[0]
    heads = ("Scene", "Token off", "Token auto", "Speedup", "Passes", "Accepted")
    note = "A story, a rename in code, the arguments of a call; greedy, agents at once."
    rows = tuple(_row(found, scene) for scene in scenes)
    worst = min(_speedup(found, scene) for scene in scenes)
    return Results(
        (ReportTable("`speculation: auto` on real text", heads, rows, note),),
        (at_least("worst scene, against off", worst, ALL_BUT_NOTHING),),
        {f"{one.who} {one.what}": one.values for one in found.samples},
    )


def _row(found: BenchResult, scene: str) -> tuple[str, ...]:
    return (
        scene,
        lasting(found.of("off", f"{scene}: token_s")),
        lasting(found.of("on", f"{scene}: token_s")),
        times(_speedup(found, scene)),
        times(_passes(found, scene)),
        f"{_sum(found, scene, 'accepted'):.0f} of {_sum(found, scene, 'drafted'):.0f}",
    )


def run(stage: Sandbox, plan: DraftsPlan) -> Results:
    """Run all scenes, with both engines in one process."""
    stage.say("the whole engine, with drafts and without")
    trial = Drafts(plan.scenes, plan.n_prompt, plan.n_tokens, plan.passes)
    found = measure(stage, [trial])[0]
    rows = tuple(
        (*_row(found, scene), times(_gap(found, scene)) if "prose" in texts else "-")
        for scene, texts in plan.scenes.items()
    )
    heads = ("Scene", "Token without", "Token with", "Speedup", "Passes", "Accepted", "p99 gap")
    note = (
        "Copied: 40 tokens of the prompt and 4 others by turns. Adversarial: 6 and 3. Mixed: one "
        "copies, two write prose. The gap is that between two tokens of prose."
    )
    return Results(
        (ReportTable("Speculative decoding", heads, rows, note),),
        tuple(_target(found, scene, texts) for scene, texts in plan.scenes.items()),
        {f"{one.who} {one.what}": one.values for one in found.samples},
    )


def _target(found: BenchResult, scene: str, texts: tuple[str, ...]) -> BenchTarget:
    if scene == "prose x 3":
        return at_most(f"{scene}: p99 gap, against without", _gap(found, scene), MAX_GAP)
    if texts[0] == "schema":
        return at_most(f"{scene}: passes, against without", _passes(found, scene), 0.5)
    bound = ALL_BUT_NOTHING
    if set(texts) == {"copied"}:
        bound = 1.8 if len(texts) == 1 else 1.3
    return at_least(f"{scene}: speed, against without", _speedup(found, scene), bound)


def _speedup(found: BenchResult, scene: str) -> float:
    return _ratio(found, f"{scene}: token_s")


def _gap(found: BenchResult, scene: str) -> float:
    return 1 / _ratio(found, f"{scene}: gap_s")


def _ratio(found: BenchResult, what: str) -> float:
    """Median ratio of the passes, each measuring both sides."""
    each = zip(found.of("off", what), found.of("on", what), strict=True)
    return spread([ratio(off, on) for off, on in each]).median


def _passes(found: BenchResult, scene: str) -> float:
    what = f"{scene}: passes"
    return ratio(sum(found.of("on", what)), sum(found.of("off", what)))


def _sum(found: BenchResult, scene: str, what: str) -> float:
    return sum(found.of("on", f"{scene}: {what}"))
