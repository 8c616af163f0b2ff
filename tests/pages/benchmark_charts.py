"""Draws the charts of the benchmarks page from the figures that stand there."""

import re
from pathlib import Path

from mlxstack.bench.report import Bar, BarChart
from mlxstack.bench.svg_chart import filename, svg

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
IMAGES = PAGE.parent / "img"
UNITS = {"": 1.0, " s": 1.0, " ms": 1e-3, " us": 1e-6}
BAR = re.compile(r"(.*?) +[█▏▎▍▌▋▊▉]+ +(([\d.]+)( \w+)?)")


def charts(page: str) -> list[BarChart]:
    """Every text chart of a page, as `--markdown` prints it."""
    sections = re.findall(r"^#+ (.*)\n\n```\n([^`]*[█▏▎▍▌▋▊▉][^`]*)```", page, re.MULTILINE)
    return [BarChart(title, tuple(map(_bar, lines.splitlines()))) for title, lines in sections]


def pictures() -> dict[str, str]:
    """The charts of the benchmarks page by the names of their files."""
    return {f"{filename(c.title)}.svg": svg(c) for c in charts(PAGE.read_text(encoding="utf-8"))}


def _bar(line: str) -> Bar:
    match = BAR.fullmatch(line)
    assert match is not None, line
    label, bar, number, unit = match.groups()
    return Bar(label, float(number) * UNITS[unit or ""], bar)
