"""Theme and keys of the dashboard from a file of the user."""

from pathlib import Path

import pytest
from textual.widgets import DataTable

from mlxstack.core.errors import SetupError
from mlxstack.tui.app import Dashboard
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.settings import FILE, keymap, read_settings, theme_choice
from tests.tui import shots
from tests.tui.conftest import settled
from tests.tui.slot_service import Clerk
from tests.tui.test_questions import text

OWN = """
theme: nord
colors: {accent: "#ff8800"}
keys:
  search: f
  quit: ctrl+q, f10
  erase: X
"""


def dashboard(home: Path) -> Dashboard:
    own = read_settings(home / FILE)
    look = theme_choice(own, home / "tui.json")
    feed = RecordingFeed("127.0.0.1:7109", shots.working()[-1:])
    return Dashboard(feed, Clerk(), look, keymap=keymap(own))


async def test_keys_and_colors_of_the_file_take_the_place_of_others(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(OWN)
    app = dashboard(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert app.current_theme.accent == "#ff8800"
        assert app.current_theme.success == app.available_themes["nord"].success
        await pilot.press("slash")
        assert "Show which rows" not in text(pilot)
        await pilot.press("3", "f", *"claude", "enter")
        await settled(pilot)
        assert "with `claude`: 2 of 6" in text(pilot)
        await pilot.press("1", "X")
        await pilot.pause()
        assert "Erase" in text(pilot)
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        assert isinstance(app.screen, TextPage)
        shown = " ".join(text(pilot).split())
        assert "f show only rows with some words" in shown and "ctrl+q,f10 leave" in shown
        await pilot.press("escape", "q")
        assert app.is_running
        await pilot.press("ctrl+q")
    assert app.return_code == 0


def test_without_a_file_nothing_changes(tmp_path: Path) -> None:
    own = read_settings(tmp_path / FILE)
    assert keymap(own) == {}
    assert theme_choice(own, tmp_path / "tui.json").theme == "mlx-stack"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("keys: {serach: f}", "keys: no key is called `serach`; did you mean `search`?"),
        ("keys: {zzzzzz: f}", "no key is called `zzzzzz`; there is agents, back, cache"),
        ("keys: {sort: contrl+s}", "keys.sort is `contrl+s`, which no terminal sends; write it as"),
        ("keys: {sort: hash mark}", "keys.sort is `hash mark`, which no terminal sends"),
        ("theme: nrod", "theme: no theme is called `nrod`; did you mean `nord`?"),
        ("colors: {akcent: red}", "colors: no color is called `akcent`; did you mean `accent`?"),
        ("colors: {accent: rot}", "colors.accent is `rot`, which is no color; write it as"),
        ("keyz: {sort: f}", "keyz"),
        ("theme: [", "this is not YAML"),
    ],
)
def test_a_wrong_entry_is_named_in_one_sentence(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / FILE).write_text(line + "\n")
    with pytest.raises(SetupError) as raised:
        read_settings(tmp_path / FILE)
    assert told in raised.value.message and FILE in raised.value.message
    assert "\n" not in raised.value.message


async def test_a_search_shows_its_hits_while_it_is_typed(tmp_path: Path) -> None:
    app = dashboard(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3", "slash")
        await settled(pilot)
        assert "6 rows" in text(pilot)
        await pilot.press(*"codex")
        await settled(pilot)
        assert "1 row" in text(pilot) and "qwen · lab" not in text(pilot)
        await pilot.press("escape")
        await settled(pilot)
        assert "qwen · lab" in text(pilot)
        assert app.screen.query(DataTable)
