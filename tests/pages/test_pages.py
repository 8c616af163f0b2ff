"""L2: the pages that are drawn from the code are what the code says now."""

import pytest

from mlxstack.host.preset_schema import description, json_schema, keys_in
from tests.pages.__main__ import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_l2_a_drawn_page_is_up_to_date(name: str) -> None:
    drawn = PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == drawn, "run `make docs`"


def test_every_key_of_a_preset_has_a_meaning() -> None:
    assert [path for path, _, field in keys_in() if not description(field)] == []


def test_editors_are_told_what_a_key_means() -> None:
    slots = json_schema()["$defs"]["SlotSpec"]["properties"]
    assert slots["count"]["description"].startswith("Number of slots")
