"""Bar charts of a report as SVG, in light and dark colors."""

import re
from html import escape
from pathlib import Path

from mlxstack.bench.report import BarChart, BenchReport

OWN = "mlx-stack"
WIDTH = 720
ROW = 28
BAR = 18
TOP = 48
LETTER = 7.5
GAP = 12
EDGE = 16
VALUE = 90
"""Pixels of a letter of a label, between columns, at the edges, and for the value of a bar."""
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.label { text-anchor: end }
.own { fill: #0969da }
.other { fill: #afb8c1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .own { fill: #4493f8 }
  .other { fill: #6e7681 }
}"""


def svg(chart: BarChart) -> str:
    """Bar chart from zero; bars of mlx-stack are colored."""
    most = max((bar.value for bar in chart.bars), default=0.0) or 1.0
    start = EDGE + LETTER * max((len(bar.label) for bar in chart.bars), default=0) + GAP
    room = WIDTH - EDGE - VALUE - start
    has_own = any(OWN in bar.label for bar in chart.bars)
    height = TOP + ROW * len(chart.bars) + EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(chart.title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<text class="title" x="{EDGE}" y="30">{escape(chart.title)}</text>',
    ]
    for i, bar in enumerate(chart.bars):
        top = TOP + ROW * i
        width = max(1.0, room * bar.value / most)
        kind = "own" if OWN in bar.label or not has_own else "other"
        line = top + BAR - 4
        lines += [
            f'<text class="label" x="{start - GAP:g}" y="{line}">{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{start:g}" y="{top}" width="{width:.1f}" height="{BAR}" '
            'rx="2"/>',
            f'<text x="{start + width + GAP:.1f}" y="{line}">{escape(bar.text)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def write(report: BenchReport, folder: Path) -> list[Path]:
    """Write every chart of a report into a folder; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for chart in report.charts:
        files.append(folder / f"{filename(chart.title)}.svg")
        files[-1].write_text(svg(chart), encoding="utf-8")
    return files


def filename(title: str) -> str:
    """Name of the file of a chart, without its ending."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
