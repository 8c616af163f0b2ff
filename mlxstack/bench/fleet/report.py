"""Tables by width, chart and samples of the fleet benchmark."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxstack.bench.fleet.play import FleetPlan, PlayedRun
from mlxstack.bench.report import Bar, BarChart, ReportTable, Results
from mlxstack.bench.statistics import percentile, ratio, seconds, spread, times

Passes = Sequence[dict[str, dict[int, PlayedRun]]]


class Figure(Struct, frozen=True):
    """Row of a table: value of a run and its text."""

    name: str
    value: Callable[[PlayedRun], float]
    text: Callable[[float], str]


def _ttft(run: PlayedRun, percent: int) -> float:
    return percentile([request.ttft_s for request in run.answered], percent)


def _n_computed(run: PlayedRun) -> float:
    return sum(request.answer.n_prompt - request.answer.n_reused for request in run.answered)


def _n_answered(run: PlayedRun) -> float:
    return sum(request.answer.n_answer for request in run.answered)


def _reused(run: PlayedRun) -> float:
    n_prompt = sum(request.answer.n_prompt for request in run.answered)
    return ratio(sum(request.answer.n_reused for request in run.answered), n_prompt)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


RATE = Figure("turns per minute", lambda run: run.rate_per_minute, lambda value: f"{value:.1f}")
FIGURES = (
    RATE,
    Figure("a session", lambda run: sum(run.session_s) / len(run.session_s), seconds),
    Figure("first token, p50", lambda run: _ttft(run, 50), seconds),
    Figure("first token, p95", lambda run: _ttft(run, 95), seconds),
    Figure(
        "longest pause of an answer",
        lambda run: max(request.longest_gap_s for request in run.answered),
        seconds,
    ),
    Figure("prompt tokens computed", _n_computed, _count),
    Figure("prompt tokens reused", _reused, _percent),
    Figure(
        "answer tokens",
        lambda run: sum(request.answer.n_answer for request in run.answered),
        _count,
    ),
    Figure("answers equal to alone", lambda run: ratio(run.n_equal, run.n_compared), _percent),
)
NOTE = (
    "Medians of all passes. A turn is one request of an agent. Tokens are counted by each server; "
    "one that does not count what it reuses shows 0 %."
)


def results(passes: Passes, plan: FleetPlan) -> Results:
    """Tables, chart and samples of at least one pass."""
    names = list(passes[0])
    tables = tuple(_table(passes, names, width) for width in plan.widths)
    bars = tuple(
        _bar(name, width, _values(passes, name, width, RATE))
        for width in plan.widths
        for name in names
    )
    raw = {
        f"{figure.name}, {name}, {width} at a time": _values(passes, name, width, figure)
        for figure in FIGURES
        for name in names
        for width in plan.widths
    }
    return Results(tables, (), raw, (BarChart("Turns per minute", bars),))


def _table(passes: Passes, names: Sequence[str], width: int) -> ReportTable:
    columns = [f"{width} at a time", *names]
    columns += [f"{names[0]} / {name}" for name in names[1:]]
    rows = []
    for figure in FIGURES:
        medians = [spread(_values(passes, name, width, figure)).median for name in names]
        ratios = [times(ratio(medians[0], median)) for median in medians[1:]]
        rows.append((figure.name, *map(figure.text, medians), *ratios))
    return ReportTable(f"Agents: {width} at a time", tuple(columns), tuple(rows), NOTE)


def _values(passes: Passes, name: str, width: int, figure: Figure) -> tuple[float, ...]:
    return tuple(figure.value(played[name][width]) for played in passes)


def _bar(name: str, width: int, values: Sequence[float]) -> Bar:
    median = spread(values).median
    return Bar(f"{name}, {width} at a time", median, f"{median:.1f}")
