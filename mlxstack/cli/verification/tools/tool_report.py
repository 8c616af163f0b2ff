"""Report of `verify --tools`, with the loser of each kind."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from mlxstack.bench.environment import Conditions
from mlxstack.cli.verification.tools.call_check import CallCheck, CallOutcome
from mlxstack.cli.verification.tools.call_tasks import CallKind
from mlxstack.cli.verification.tools.comparison import RepairComparison
from mlxstack.cli.verification.tools.repair_agent import RepairResult
from mlxstack.text.template.tool_losses import LostPart

MIN_VALID = 0.8
"""Share of valid calls below which a kind is lost."""
MIN_LEAD = 5
"""More valid calls of a hundred that another model needs to be named as better."""
EVERY_KIND = frozenset(CallKind)
AFTER_CALLS = frozenset({CallKind.RESULTS, CallKind.TURNS})
AFFECTED: dict[LostPart, frozenset[CallKind]] = {
    LostPart.CALLS: AFTER_CALLS | {CallKind.PARALLEL},
    LostPart.ARGUMENTS: AFTER_CALLS,
    LostPart.OBJECTS: AFTER_CALLS,
    LostPart.PARALLEL: frozenset({CallKind.RESULTS, CallKind.PARALLEL}),
    LostPart.RESULTS: AFTER_CALLS,
    LostPart.TEXT: frozenset(),
    LostPart.ANSWERS: AFTER_CALLS,
    LostPart.ORDER: AFTER_CALLS,
}
"""Kinds that a loss of the template explains; all of them where it is not in this table."""


class KindResult(Struct, frozen=True):
    """Calls of a kind."""

    kind: CallKind
    n: int
    """Requests that were made."""
    n_valid: int
    n_exact: int
    n_loops: int
    outcomes: dict[str, int]
    """Requests by outcome."""
    loser: str = ""
    """`template` or `weights`, where fewer than four of five are valid."""


class TemplateLosses(Struct, frozen=True):
    """Parts of conversations that a template loses."""

    digest: str
    by_template: tuple[LostPart, ...] = ()
    in_prompt: tuple[LostPart, ...] = ()
    """Lost in the prompts of this server too, which writes what it can in another way."""


class BetterModel(Struct, frozen=True):
    """Other model with the same template that makes more valid calls."""

    model: str
    n_valid: int


class ToolReport(Struct, frozen=True, kw_only=True):
    """All of it; `is_sound` if neither template nor weights lose."""

    preset: str
    model: str
    conditions: Conditions
    seconds: float
    estimate_s: float
    """Expected seconds, printed at the beginning."""
    limit_s: float
    """Seconds after which no request goes on."""
    is_quick: bool
    n_calls: int
    n_valid: int
    n_exact: int
    n_loops: int
    n_left_out: int
    """Requests that the limit of time left out."""
    template: TemplateLosses
    kinds: tuple[KindResult, ...]
    checks: tuple[CallCheck, ...]
    repairs: tuple[RepairResult, ...] = ()
    against: tuple[RepairComparison, ...] = ()
    better: BetterModel | None = None
    is_sound: bool = False

    @property
    def losers(self) -> tuple[str, ...]:
        """Template, weights or both, where they lose."""
        names = {kind.loser for kind in self.kinds} - {""}
        if self.template.by_template:
            names.add("template")
        return tuple(sorted(names))


def kind_results(checks: Sequence[CallCheck], lost: Collection[LostPart]) -> tuple[KindResult, ...]:
    """Results by kind, each with its loser."""
    results = []
    for kind in CallKind:
        answered = [
            check
            for check in checks
            if check.kind is kind and check.outcome is not CallOutcome.NOT_MADE
        ]
        if not answered:
            continue
        n_valid = sum(check.outcome is CallOutcome.VALID for check in answered)
        loser = ""
        if n_valid < MIN_VALID * len(answered):
            is_explained = any(kind in AFFECTED.get(part, EVERY_KIND) for part in lost)
            loser = "template" if is_explained else "weights"
        results.append(
            KindResult(
                kind=kind,
                n=len(answered),
                n_valid=n_valid,
                n_exact=sum(check.is_exact for check in answered),
                n_loops=sum(check.is_loop for check in answered),
                outcomes=dict(Counter(check.outcome.value for check in answered)),
                loser=loser,
            )
        )
    return tuple(results)


def better_model(report: ToolReport, reports: Iterable[ToolReport]) -> BetterModel | None:
    """The best reports model of the same template, if clearly better."""
    rivals = [
        rival
        for rival in reports
        if rival.model != report.model
        and rival.template.digest == report.template.digest
        and (rival.is_quick, rival.n_calls) == (report.is_quick, report.n_calls)
        and rival.n_valid >= report.n_valid + MIN_LEAD
    ]
    best = max(rivals, key=lambda rival: rival.n_valid, default=None)
    return None if best is None else BetterModel(best.model, best.n_valid)
