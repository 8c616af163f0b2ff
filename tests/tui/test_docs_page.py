"""docs/tui.md shows pictures that exist and deeds that can be done."""

import re
from pathlib import Path

from mlxstack.tui.actions import ACTIONS

PAGE = Path(__file__).parents[2] / "docs" / "tui.md"


def test_every_picture_of_the_page_is_a_checked_one() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(pictures) >= 8
    for picture in pictures:
        assert (PAGE.parent / picture).is_file(), picture


def test_the_page_has_the_deeds_of_the_registry() -> None:
    rows = re.findall(r"^\| `(\w)` \| (.+?) \| (\w+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == [(deed.key, deed.help, deed.wants.value) for deed in ACTIONS]
