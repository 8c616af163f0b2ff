"""Benchmark report: conditions, tables, charts, targets; Markdown and terminal."""

from collections.abc import Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxstack.bench.environment import Conditions, details
from mlxstack.bench.statistics import times

WIDTH = 40
PARTS = " ▏▎▍▌▋▊▉█"


class Bar(Struct, frozen=True):
    """`text` is the value in words."""

    label: str
    value: float
    text: str


class BarChart(Struct, frozen=True):
    """Bars from zero to the greatest value."""

    title: str
    bars: tuple[Bar, ...]


class ReportTable(Struct, frozen=True):
    """Cells are texts for people; `note` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class BenchTarget(Struct, frozen=True):
    """Target: `value` at most, or least, `bound`; unit "x": ratio."""

    name: str
    value: float
    bound: float
    is_met: bool
    is_upper: bool
    unit: str = "x"


class BenchReport(Struct, frozen=True):
    """One run of one benchmark; `raw` are its samples by name."""

    name: str
    command: str
    conditions: Conditions
    tables: tuple[ReportTable, ...]
    targets: tuple[BenchTarget, ...] = ()
    raw: dict[str, tuple[float, ...]] = {}
    charts: tuple[BarChart, ...] = ()


class Results(Struct, frozen=True):
    """The part of a report that a benchmark itself fills."""

    tables: tuple[ReportTable, ...]
    targets: tuple[BenchTarget, ...] = ()
    raw: dict[str, tuple[float, ...]] = {}
    charts: tuple[BarChart, ...] = ()


def at_most(name: str, value: float, bound: float, unit: str = "x") -> BenchTarget:
    """A target that small values meet."""
    return BenchTarget(name, value, bound, value <= bound, is_upper=True, unit=unit)


def at_least(name: str, value: float, bound: float, unit: str = "x") -> BenchTarget:
    """A target that great values meet."""
    return BenchTarget(name, value, bound, value >= bound, is_upper=False, unit=unit)


def targets_table(targets: Sequence[BenchTarget]) -> ReportTable:
    """All targets with what came out."""
    rows = tuple(
        (
            target.name,
            f"{'at most' if target.is_upper else 'at least'} {_figure(target.bound, target.unit)}",
            _figure(target.value, target.unit),
            "met" if target.is_met else "MISSED",
        )
        for target in targets
    )
    return ReportTable("Targets", ("Target", "Bound", "Measured", "Result"), rows)


def _figure(value: float, unit: str) -> str:
    return times(value) if unit == "x" else f"{value:.4g} {unit}"


def draw(chart: BarChart) -> list[str]:
    """One line of text per bar."""
    most = max((bar.value for bar in chart.bars), default=0.0) or 1.0
    widest = max((len(bar.label) for bar in chart.bars), default=0)
    return [f"{b.label:<{widest}}  {block(b.value / most)}  {b.text}" for b in chart.bars]


def block(share: float) -> str:
    """Bar of `share` (0 to 1) width, in eighths."""
    eighths = round(max(0.0, min(1.0, share)) * WIDTH * 8)
    return "█" * (eighths // 8) + PARTS[eighths % 8].strip()


def show(report: BenchReport, console: Console) -> None:
    """Print the report in a terminal."""
    conditions = report.conditions
    console.print(Text(report.name, "bold"))
    console.print(Text(f"{conditions.machine}; {conditions.blas}; load {conditions.load:.2f}"))
    console.print(Text(f"{_versions(conditions)}. Model: {conditions.model}"))
    for line in details(conditions):
        console.print(Text(line))
    for table in _tables(report):
        console.print(_drawn(table))
    for chart in report.charts:
        console.print(Text("\n".join(["", chart.title, *draw(chart)])))


def markdown(report: BenchReport) -> str:
    """The report as Markdown, ready for docs/benchmarks.md."""
    conditions = report.conditions
    lines = [
        f"## {report.name}",
        "",
        f"`{report.command}`, {conditions.day}",
        "",
        f"{conditions.machine}; {conditions.blas}; load before the run {conditions.load:.2f}.",
        f"{_versions(conditions)}. Model: {conditions.model}.",
        *(f"{line}." for line in details(conditions)),
        "",
    ]
    charts = [line for chart in report.charts for line in chart_markdown(chart)]
    return "\n".join([*lines, *map(table_markdown, _tables(report)), *charts])


def chart_markdown(chart: BarChart) -> list[str]:
    """Bars in a code block."""
    return [f"### {chart.title}", "", "```", *draw(chart), "```", ""]


def table_markdown(table: ReportTable) -> str:
    columns = _line(table.columns)
    rule = _line(["---", *("---:" for _ in table.columns[1:])])
    lines = [f"### {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines += [columns, rule, *map(_line, table.rows), ""]
    return "\n".join(lines)


def _versions(conditions: Conditions) -> str:
    return ", ".join(f"{name} {version}" for name, version in conditions.versions.items())


def _tables(report: BenchReport) -> list[ReportTable]:
    tables = list(report.tables)
    if report.targets:
        tables.append(targets_table(report.targets))
    return tables


def _drawn(table: ReportTable) -> Table:
    drawn = Table(title=Text(table.title), title_justify="left", caption=Text(table.note))
    drawn.caption_justify = "left"
    for i, head in enumerate(table.columns):
        drawn.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
