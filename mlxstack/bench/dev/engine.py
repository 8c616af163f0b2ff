"""`bench dev engine`: our batch and mlx-lm's in one process."""

from msgspec import Struct

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.trials import (
    BenchResult,
    ExactSteps,
    FullEngine,
    Joins,
    LoopRuleCost,
    Steps,
)
from mlxstack.bench.report import BenchTarget, ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import lasting, megabytes, ratio, seconds, spread, times

SLACK_S = 0.002
"""Tolerated growth of join time with KV: clocks are noisy."""
LOOP_RULE_SHARE = 0.005
"""Tolerated share of the rule against repetition in a decode step."""
LOOP_RULE_TEXTS = {
    "plain": "plain",
    "twice": "the same text twice",
    "copied": "a repetition of the prompt, copied",
}


class EnginePlan(Struct, frozen=True):
    """Contexts in tokens; `present` in bytes; `rows` x `contexts` is the matrix."""

    uneven: tuple[int, ...] = (4000, 200, 200, 200)
    even: tuple[int, ...] = (2000,) * 8
    rows: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (200, 1000, 4000)
    present: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000, 500_000_000)
    n_steps: int = 20
    passes: int = 3


SMALL = EnginePlan((264, 8, 8), (32, 32), (1, 2), (8, 32), (20_000, 200_000), 4, 3)


class Side(Struct, frozen=True):
    """One batch shape: what it is called, and what was found."""

    name: str
    contexts: tuple[int, ...]
    result: BenchResult

    def step_s(self, who: str) -> float:
        """The median time of a step."""
        return spread(self.result.of(who, "step_s")).median

    def n_bytes(self, who: str) -> float:
        return self.result.of(who, "bytes")[0]


def run(stage: Sandbox, plan: EnginePlan) -> Results:
    """Run all trials; the whole engine has its own process."""
    shapes = {"uneven": plan.uneven, "even": plan.even}
    shapes |= {f"{n} x {size}": (size,) * n for size in plan.contexts for n in plan.rows}
    stage.say("batches of rows, joins and leaves")
    steps = [Steps(contexts, plan.n_steps, plan.passes) for contexts in shapes.values()]
    moves = [Joins(n_bytes=n, passes=plan.passes) for n in plan.present]
    measured = measure(stage, [*steps, *moves])
    uneven, even, *matrix = (
        Side(*named, result) for named, result in zip(shapes.items(), measured, strict=False)
    )
    joins = measured[len(shapes) :]
    stage.say("the whole engine")
    n_tokens = max(8, 3 * plan.n_steps)
    asked = [FullEngine(n, plan.contexts[0], n_tokens, plan.passes) for n in plan.rows]
    whole = dict(zip(plan.rows, measure(stage, asked), strict=True))
    stage.say("equal bits")
    n_keys = plan.contexts[0]
    exact = [ExactSteps((n_keys,) * n, plan.n_steps, plan.passes) for n in plan.rows]
    costs = dict(zip(plan.rows, measure(stage, exact), strict=True))
    stage.say("the rule against repetition")
    (rule,) = measure(stage, [LoopRuleCost(plan.contexts[-1], plan.passes)])
    shares = _loop_rule_shares(plan, matrix, rule)
    return Results(
        (
            _shapes(uneven, even),
            _moves(plan, joins),
            _speeds(plan, matrix, whole),
            _exact(plan, costs),
            _loop_rule(plan, rule, shares),
        ),
        (*_shape_targets(uneven, even), *_move_targets(joins), _loop_rule_target(shares)),
        _raw([uneven, even, *matrix], joins),
    )


def _shapes(*sides: Side) -> ReportTable:
    rows = tuple(
        (
            "/".join(map(str, side.contexts)),
            megabytes(side.n_bytes("alone")),
            megabytes(side.n_bytes("ours")),
            megabytes(side.n_bytes("theirs")),
            lasting(side.result.of("ours", "step_s")),
            lasting(side.result.of("theirs", "step_s")),
            times(ratio(side.step_s("ours"), side.step_s("theirs"))),
        )
        for side in sides
    )
    heads = ("Contexts", "KV alone", "KV ours", "KV theirs", "Step ours", "Step theirs", "Ratio")
    note = "KV is what MLX's active memory grew by; a step makes one token for every row."
    return ReportTable("A batch of rows", heads, rows, note)


def _moves(plan: EnginePlan, joins: list[BenchResult]) -> ReportTable:
    rows = tuple(
        (
            megabytes(n_bytes),
            *(
                lasting(result.of(who, quantity))
                for quantity in ("join_s", "leave_s")
                for who in WHO
            ),
        )
        for n_bytes, result in zip(plan.present, joins, strict=True)
    )
    heads = ("KV present", "Join ours", "Join theirs", "Leave ours", "Leave theirs")
    note = "A row of 200 tokens comes and goes; timed until all KV of the batch is in its place."
    return ReportTable("Joining and leaving", heads, rows, note)


def _speeds(plan: EnginePlan, matrix: list[Side], whole: dict[int, BenchResult]) -> ReportTable:
    rows = tuple(
        (
            str(len(side.contexts)),
            str(side.contexts[0]),
            f"{len(side.contexts) / side.step_s('ours'):.1f}",
            f"{len(side.contexts) / side.step_s('theirs'):.1f}",
            times(ratio(side.step_s("theirs"), side.step_s("ours"))),
            _whole(plan, side, whole),
        )
        for side in matrix
    )
    heads = ("Rows", "Context", "tokens/s ours", "tokens/s theirs", "Ratio", "Whole engine")
    note = "The whole engine adds thread, scheduler, sampling rules, events and snapshots."
    return ReportTable("Tokens per second", heads, rows, note)


def _exact(plan: EnginePlan, costs: dict[int, BenchResult]) -> ReportTable:
    rows = []
    for n_rows, result in costs.items():
        ours, exact = (spread(result.of(who, "step_s")).median for who in ("ours", "exact"))
        speeds = [f"{n_rows / step_s:.1f}" for step_s in (ours, exact)]
        rows.append((str(n_rows), *speeds, f"{exact / ours - 1:+.0%}"))
    heads = ("Rows", "tokens/s", "tokens/s with equal bits", "Cost of a step")
    note = f"`batch.exact: on` over contexts of {plan.contexts[0]} tokens."
    return ReportTable("Equal bits", heads, tuple(rows), note)


LoopRuleShares = dict[str, list[float]]
"""Shares of a decode step by text, for each number of rows."""


def _loop_rule_shares(plan: EnginePlan, matrix: list[Side], rule: BenchResult) -> LoopRuleShares:
    """Every row of a step adds a token to its own rule."""
    steps = [side for side in matrix if side.contexts[0] == plan.contexts[0]]
    shares = {}
    for text in LOOP_RULE_TEXTS:
        token_s = spread(rule.of(text, "token_s")).median
        shares[text] = [len(side.contexts) * token_s / side.step_s("ours") for side in steps]
    return shares


def _loop_rule(plan: EnginePlan, rule: BenchResult, shares: LoopRuleShares) -> ReportTable:
    rows = []
    for text, name in LOOP_RULE_TEXTS.items():
        token_s = spread(rule.of(text, "token_s")).median
        rows.append((name, seconds(token_s), *(f"{share:.3%}" for share in shares[text])))
    heads = ("Answer", "A token", *(f"{n} row{'s' * (n > 1)}" for n in plan.rows))
    note = (
        f"Share of a decode step over contexts of {plan.contexts[0]} tokens; answers of "
        f"{plan.contexts[-1]} tokens. It is part of the whole engine above only where a request "
        "asks for it."
    )
    return ReportTable("The rule against repetition", heads, tuple(rows), note)


def _loop_rule_target(shares: LoopRuleShares) -> BenchTarget:
    greatest = max(share for of_text in shares.values() for share in of_text)
    name = "rule against repetition: greatest share of a step"
    return at_most(name, 100 * greatest, 100 * LOOP_RULE_SHARE, "%")


def _whole(plan: EnginePlan, side: Side, whole: dict[int, BenchResult]) -> str:
    """Measured at the shortest context only."""
    n = len(side.contexts)
    if side.contexts[0] != plan.contexts[0]:
        return "-"
    return f"{n / spread(whole[n].of('engine', 'step_s')).median:.1f}"


def _shape_targets(uneven: Side, even: Side) -> tuple[BenchTarget, ...]:
    bytes_ratio = ratio(uneven.n_bytes("ours"), uneven.n_bytes("alone"))
    return (
        at_most("uneven rows: bytes, against the rows alone", bytes_ratio, 1.05),
        at_most("uneven rows: step, against theirs", _step_ratio(uneven), 0.7),
        at_most("even rows: step, against theirs", _step_ratio(even), 1.03),
    )


def _step_ratio(side: Side) -> float:
    return ratio(side.step_s("ours"), side.step_s("theirs"))


def _move_targets(joins: list[BenchResult]) -> tuple[BenchTarget, ...]:
    targets = []
    for move in ("join", "leave"):
        medians = [spread(result.of("ours", f"{move}_s")).median for result in joins]
        grew = 1e3 * (max(medians) - min(medians))
        name = f"{move}: slowest less fastest, whatever KV is there"
        targets.append(at_most(name, grew, 1e3 * SLACK_S, "ms"))
    return tuple(targets)


def _raw(sides: list[Side], joins: list[BenchResult]) -> dict[str, tuple[float, ...]]:
    raw = {
        f"{side.name}: {sample.who} {sample.quantity}": sample.values
        for side in sides
        for sample in side.result.samples
    }
    for i, moves in enumerate(joins):
        raw |= {
            f"joins {i}: {sample.who} {sample.quantity}": sample.values for sample in moves.samples
        }
    return raw


WHO = ("ours", "theirs")
