"""The walks of docs/contributing.md: their examples are what the code reads."""

import json
import re
from pathlib import Path

import pytest

from mlxstack.config import presets
from mlxstack.core.status import RequestView
from mlxstack.features.formats import families
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.host.home import Home
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import requests
from mlxstack.tui.views.table_data import GAP, Column, DrawContext, tabulated
from tests.features.formats.test_argument_values import TOOLS
from tests.host.test_preset_reading import SOURCES
from tests.policy.test_weights import estimate

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")


def blocks(walk: str, language: str) -> list[str]:
    """Code of a walk, without the indent of its list."""
    text = PAGE.split(f"### {walk}\n")[1].split("\n##")[0]
    fenced = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in fenced]


@pytest.mark.mlx
def test_the_preset_of_the_walk_is_one_that_the_tests_accept(tmp_path: Path) -> None:
    (config,) = (json.loads(code) for code in blocks("A preset", "json"))
    (written,) = blocks("A preset", "yaml")
    file = tmp_path / "walk.yaml"
    file.write_text(written)
    preset = presets.load(str(file), Home(tmp_path)).preset
    assert config["excerpt_of"] == preset.model.id
    assert preset.description and preset.sampling.temperature
    assert not [text for text in (*SOURCES, "published") if text not in written]
    weights = estimate({key: config[key] for key in config if key != "quantization"})
    n_parameters = weights.n_half + weights.n_single
    assert n_parameters == pytest.approx(config["published_parameters"], rel=0.0012)
    (commands,) = blocks("A preset", "bash")
    for name in (f"presets/{preset.name}.yaml", f"presets/configs/{preset.name}.json"):
        assert name in commands


def test_the_column_of_the_walk_goes_where_the_page_says() -> None:
    column: Column[RequestView] = eval(
        blocks("A column of the dashboard", "python")[0], vars(requests)
    )[0]
    assert (column.title, column.width, column.min_screen) == ("drafts", 6, 160)
    rows = [("r", RequestView("r", n_drafted=40, n_accepted=30))]
    columns = (*requests.REQUESTS, column)
    wide = tabulated((), columns, rows, DrawContext(DashboardState(), 160), "")
    assert wide.rows[0].cells[-1].text == "75%"
    assert sum(column.width + GAP for column in wide.columns) <= 160
    narrow = tabulated((), columns, rows, DrawContext(DashboardState(), 159), "")
    assert wide.columns[-1].title not in [column.title for column in narrow.columns]


def test_the_call_format_of_the_walk_is_read() -> None:
    row, _ = blocks("A call format", "python")
    family = eval(row, vars(families))
    written = re.findall(r"Example: `(.+?)`", PAGE)[0]
    assert written.startswith(family.format.calls.opens)
    message = read_answer(family.format, written, TOOLS)
    (call,) = message.tool_calls
    assert (call.name, call.arguments, message.content) == ("edit", {"path": "a.py"}, "")


def test_every_file_and_folder_of_the_walks_exists() -> None:
    named = set(re.findall(r"(?<![\w/.])(?:mlxstack|tests|docs|presets)/[\w/.-]+", PAGE))
    examples = {name for name in named if "qwen2.5-coder-0.5b" in name or "NAME" in name}
    assert len(named) > 10
    assert [name for name in named - examples if not (ROOT / name).exists()] == []
