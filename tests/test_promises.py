"""The pages of promises name tests, and there are such tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(test_\w+)`")


@pytest.mark.parametrize("page", ["security.md", "reliability.md"])
def test_every_row_names_a_test_that_exists(page: str) -> None:
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    text = (ROOT / "docs" / page).read_text()
    assert set(NAMED.findall(text)) <= names
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.endswith("| test |")
    ]
    assert len(rows) > 15
    assert [row for row in rows if not NAMED.search(row)] == []
