"""A report as Markdown, ready for docs/benchmarks.md."""

from mlxstack.bench.bar_chart import BarChart, draw
from mlxstack.bench.report import BenchReport, ReportTable, targets_table


def markdown(report: BenchReport) -> str:
    """Heading, command, conditions, tables, targets."""
    said = report.conditions
    versions = ", ".join(f"{name} {version}" for name, version in said.versions.items())
    lines = [
        f"## {report.name}",
        "",
        f"`{report.command}`, {said.day}",
        "",
        f"{said.machine}; {said.blas}; load before the run {said.load:.2f}.",
        f"{versions}. Model: {said.model}.",
        "",
    ]
    tables = [*report.tables, *([targets_table(report.targets)] if report.targets else [])]
    drawn = [line for one in report.charts for line in chart(one)]
    return "\n".join([*lines, *(table(one) for one in tables), *drawn])


def chart(one: BarChart) -> list[str]:
    """Bars in a code block."""
    return [f"### {one.title}", "", "```", *draw(one), "```", ""]


def table(one: ReportTable) -> str:
    """One table under its title."""
    heads = _line(one.heads)
    rule = _line(["---", *("---:" for _ in one.heads[1:])])
    note = [one.note, ""] if one.note else []
    return "\n".join(
        [f"### {one.title}", "", *note, heads, rule, *(_line(row) for row in one.rows), ""]
    )


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
