"""A report as tables in the terminal."""

from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from mlxstack.bench.bar_chart import draw
from mlxstack.bench.report import BenchReport, ReportTable, targets_table


def show(report: BenchReport, console: Console) -> None:
    """Conditions, tables, targets."""
    said = report.conditions
    versions = ", ".join(f"{name} {version}" for name, version in said.versions.items())
    console.print(Text(report.name, "bold"))
    console.print(Text(f"{said.machine}; {said.blas}; load {said.load:.2f}"))
    console.print(Text(f"{versions}. Model: {said.model}"))
    for one in report.tables:
        console.print(_drawn(one))
    if report.targets:
        console.print(_drawn(targets_table(report.targets)))
    for chart in report.charts:
        console.print(Text("\n".join(["", chart.title, *draw(chart)])))


def _drawn(one: ReportTable) -> Drawn:
    drawn = Drawn(title=Text(one.title), title_justify="left", caption=Text(one.note))
    drawn.caption_justify = "left"
    for i, head in enumerate(one.heads):
        drawn.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in one.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
