"""Reports as Markdown, in a terminal, and as JSON."""

import io
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxstack.bench.dev.serving_report import crowd_row, summary, throughput
from mlxstack.bench.dev.serving_scenarios import ServePlan
from mlxstack.bench.environment import Conditions
from mlxstack.bench.report import (
    Bar,
    BarChart,
    BenchReport,
    ReportTable,
    at_most,
    block,
    draw,
    markdown,
    show,
    table_markdown,
)
from mlxstack.bench.svg_chart import write

SAID = Conditions("2026-11-20", "a machine", {"mlx": "1.0"}, "a model", "no BLAS", 0.5)
TABLE = ReportTable(
    "Speeds", ("What", "How fast"), (("a | b", "1 s"), ("[bold]c", "2 s")), "A note."
)
REPORT = BenchReport(
    name="bench x",
    command="mlx-stack bench x",
    conditions=SAID,
    tables=(TABLE,),
    targets=(at_most("t", 2, 1),),
    raw={"a": (1.0,)},
    charts=(BarChart("Bars", (Bar("one", 1.0, "1 s"), Bar("three", 3.0, "3 s"))),),
)


def test_a_table_in_markdown_has_as_many_cells_in_every_line() -> None:
    lines = [line for line in table_markdown(TABLE).splitlines() if line.startswith("|")]
    assert lines[1] == "| --- | ---: |"
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}


def test_markdown_names_command_machine_and_targets() -> None:
    told = markdown(REPORT)
    for expected in ("## bench x", "`mlx-stack bench x`", "a machine", "mlx 1.0", "MISSED"):
        assert expected in told


@given(st.floats(0, 1))
def test_bars_grow_with_their_share(share: float) -> None:
    assert len(block(share)) <= len(block(1.0)) == 40
    assert len(block(share / 2)) <= len(block(share))


def test_bars_stand_in_line() -> None:
    one, three = draw(REPORT.charts[0])
    assert one.index("█") == three.index("█")
    assert three.count("█") == 40
    assert one.count("█") == 13


def test_the_terminal_shows_cells_as_they_are() -> None:
    out = io.StringIO()
    show(REPORT, Console(file=out, width=100))
    assert "[bold]c" in out.getvalue()
    assert "MISSED" in out.getvalue()


def test_a_report_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=BenchReport) == REPORT


def test_k1_a_crowd_sums_up_its_passes() -> None:
    found = {
        "crowd 1: seconds": (1.0, 1.0),
        "crowd 1: tokens": (10.0, 10.0),
        "crowd 1: decode": (12.0, 14.0),
        "crowd 1: latency": (1.0, 1.0),
        "crowd 1: ttft": (0.1, 0.1),
        "crowd 2: seconds": (1.0, 1.5),
        "crowd 2: tokens": (20.0, 20.0),
        "crowd 2: decode": (24.0, 26.0),
        "crowd 2: latency": (1.0, 1.1, 1.2, 1.3),
        "crowd 2: ttft": (0.1, 0.2, 0.3, 0.4),
    }
    plan = ServePlan(crowd=(1, 2))
    row = crowd_row("x", found, 2, plan)
    assert row[:6] == ("x", "2", "4", "40", "2.50 s", "16.0 tokens/s")
    assert row[-2:] == ("1.60 x", "partial")
    assert crowd_row("x", found, 1, plan)[-2:] == ("1.00 x", "-")
    assert throughput(found, 1) == 10.0


def test_k1_verdicts() -> None:
    assert [summary(s) for s in (2.0, 1.99, 1.5, 1.49)] == ["meets", "partial", "partial", "below"]


@pytest.mark.parametrize("labels", [("one", "three"), ("mlx-stack", "a <b>")])
def test_a_chart_is_a_picture_with_bars_to_scale(labels: tuple[str, str], tmp_path: Path) -> None:
    bars = (Bar(labels[0], 1.0, "1 s"), Bar(labels[1], 3.0, "3 s"))
    report = msgspec.structs.replace(REPORT, charts=(BarChart("Time, in s", bars),))
    (file,) = write(report, tmp_path / "charts")
    assert file.name == "time-in-s.svg"
    picture = ElementTree.parse(file).getroot()
    one, three = picture.findall("{*}rect")
    assert float(three.attrib["width"]) == pytest.approx(3 * float(one.attrib["width"]), abs=0.2)
    own = [rect.attrib["class"] == "own" for rect in (one, three)]
    assert own == ([True, True] if labels[0] == "one" else [True, False])
    texts = [text.text for text in picture.findall("{*}text")]
    assert texts == ["Time, in s", labels[0], "1 s", labels[1], "3 s"]
    edge = max(float(rect.attrib["x"]) + float(rect.attrib["width"]) for rect in (one, three))
    assert edge < float(picture.attrib["viewBox"].split()[2])
    assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8")
