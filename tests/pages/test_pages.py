"""L2: the pages that are drawn from the code are what the code says now."""

import re

import pytest

from mlxstack.config.preset_reflection import json_schema
from mlxstack.core.preset import ModelSpec, Preset
from tests.pages.__main__ import DOCS, PAGES
from tests.pages.benchmark_charts import IMAGES, charts, pictures
from tests.pages.preset_page import description, files_of, keys_in


@pytest.mark.parametrize("name", PAGES)
def test_l2_a_drawn_page_is_up_to_date(name: str) -> None:
    drawn = PAGES[name]()
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == drawn, f"docs/{name} is not what the code says: run `make docs`, commit it"


def test_the_benchmarks_page_shows_three_charts_of_its_own_figures() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    drawn = pictures()
    assert re.findall(r"^!\[.+\]\(img/(\S+\.svg)\)$", page, re.MULTILINE) == list(drawn)
    assert len(drawn) == 3
    for name, picture in drawn.items():
        written = (IMAGES / name).read_text(encoding="utf-8")
        assert written == picture, f"docs/img/{name} is not of these figures: run `make docs`"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for bar in (bar for chart in charts(page) for bar in chart.bars):
        name = bar.label.split()[-1] if "mlx" in bar.label else bar.label
        number, _, unit = bar.text.partition(" ")
        figures = [f for row in rows if name in row for f in re.findall(r"[\d.]*\d", row)]
        error = 0.0 if unit else 0.5
        assert any(abs(float(figure) - float(number)) <= error for figure in figures), bar


def test_a_preset_without_an_excerpt_is_told_where_to_put_it() -> None:
    preset = Preset(ModelSpec("org/New-4bit"), name="new")
    remedy = "put the config into presets/configs/new.json, then `make docs`"
    with pytest.raises(LookupError, match=f"org/New-4bit: {remedy}"):
        files_of(preset)


def test_every_key_of_a_preset_has_a_meaning() -> None:
    assert [path for path, field in keys_in() if not description(field)] == []


def test_editors_are_told_what_a_key_means() -> None:
    slots = json_schema()["$defs"]["SlotSpec"]["properties"]
    assert slots["count"]["description"].startswith("Number of slots")
