"""Keys that come faster than the dashboard draws: over a network they come in bursts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs
from textual.command import CommandList
from textual.events import AppBlur, AppFocus, Key, Paste
from textual.pilot import Pilot

from mlxstack.tui.app import Dashboard, Updated
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.screens.agents import AgentScreen, AgentsScreen
from mlxstack.tui.screens.dialogs import ConfirmDialog
from mlxstack.tui.screens.overview import OverviewScreen
from mlxstack.tui.screens.palette import Palette
from mlxstack.tui.state import Link, LinkState
from mlxstack.tui.theme import ThemeChoice
from tests.repetition import in_soak
from tests.tui import scenes
from tests.tui.conftest import offered, settled
from tests.tui.slot_service import Clerk

pytestmark = pytest.mark.slow

CHARACTERS = {".": "full_stop", "-": "minus"}
ERASED = ("erase", 0, "")
DELETED = ("/v1/agents/claude-main", 0, "")
KEPT = ("save", 0, "eye.kv")


@asynccontextmanager
async def attached() -> AsyncIterator[tuple[Pilot[Any], Clerk]]:
    clerk = Clerk()
    app = Dashboard(RecordingFeed("127.0.0.1:7109", scenes.busy()[-1:]), clerk, ThemeChoice())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        yield pilot, clerk


async def burst(pilot: Pilot[Any], *keys: str) -> None:
    """All of them before the first one is looked at."""
    for key in keys:
        character = key if len(key) == 1 else None
        pilot.app.post_message(Key(CHARACTERS.get(key, key), character))
    await settled(pilot)
    await settled(pilot)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        (("E", "y", "y"), [ERASED]),
        (("E", "enter", "y"), []),
        (("S", "enter", "escape"), [("save", 0, "claude-main.kv")]),
        (("S", "ctrl+u", *"eye.kvv", "backspace", "enter"), [KEPT]),
        (("S", *"eye", "escape", "down", "E", "y"), [("erase", 1, "")]),
        (("3", "enter", "escape", "down", "D", "y"), [("/v1/agents/opencode-2", 0, "")]),
        (("3", "o", "h", "h"), [("/v1/agents/claude-main", 1, "")]),
        *in_soak(
            (("E", "y"), [ERASED]),
            (("S", "enter"), [("save", 0, "claude-main.kv")]),
            (("S", "enter", "enter"), [("save", 0, "claude-main.kv")]),
            (("S", *"eye.kv", "enter"), [KEPT]),
            (("3", "D", "y"), [DELETED]),
            (("3", "down", "D", "y"), [("/v1/agents/opencode-2", 0, "")]),
            (("3", "enter", "D", "y"), [DELETED]),
        ),
    ],
)
async def test_each_key_is_meant_for_what_the_one_before_it_brought(
    keys: tuple[str, ...], asked: list[tuple[str, int, str]]
) -> None:
    async with attached() as (pilot, clerk):
        await burst(pilot, *keys)
        assert clerk.asked == asked
        assert not isinstance(pilot.app.screen, ConfirmDialog)


async def test_what_is_pasted_comes_before_the_enter_after_it() -> None:
    async with attached() as (pilot, clerk):
        pilot.app.post_message(Key("S", "S"))
        pilot.app.post_message(Paste("eye.kv\nand more"))
        await burst(pilot, "enter")
        assert clerk.asked == [KEPT]


async def test_enter_twice_opens_once() -> None:
    async with attached() as (pilot, _):
        await burst(pilot, "3", "enter", "enter")
        assert isinstance(pilot.app.screen, AgentScreen)
        await burst(pilot, "escape")
        assert isinstance(pilot.app.screen, AgentsScreen)


async def test_a_key_after_leaving_is_no_error() -> None:
    async with attached() as (pilot, _):
        await burst(pilot, "q", "q", "down", "E")
    assert pilot.app.return_code == 0


@pytest.mark.parametrize(
    "keys", [("E", "pagedown"), *in_soak((("pagedown",),), (("down", "pageup"),))]
)
async def test_the_palette_is_paged_before_it_is_drawn(keys: tuple[str, ...]) -> None:
    async with attached() as (pilot, _):
        await burst(pilot, "ctrl+p", *keys)
        assert isinstance(pilot.app.screen, Palette)


async def test_the_palette_may_be_used_too_early_and_too_late() -> None:
    async with attached() as (pilot, _):
        pilot.app.action_command_palette()
        palette = pilot.app.screen
        assert isinstance(palette, Palette)
        palette._action_command_list("page_down")
        await pilot.pause()
        found = palette.query_one(CommandList)
        while not found.has_class("--visible"):
            await pilot.pause(0.02)
        await pilot.press("escape")
        await settled(pilot)
        palette._refresh_command_list(found, [], True)
        assert isinstance(pilot.app.screen, OverviewScreen)


async def test_enter_twice_in_the_palette_asks_once() -> None:
    async with attached() as (pilot, clerk):
        await pilot.press("ctrl+p", *"erase")
        await offered(pilot, "Erase")
        await burst(pilot, "enter", "enter")
        assert isinstance(pilot.app.screen, ConfirmDialog)
        await burst(pilot, "y")
        assert isinstance(pilot.app.screen, OverviewScreen)
        assert clerk.asked == [ERASED]


async def test_the_focus_is_where_it_was_when_a_person_looks_at_the_terminal_again() -> None:
    async with attached() as (pilot, _):
        app = pilot.app
        assert isinstance(app, Dashboard)
        await pilot.press("tab")
        table = app.focused
        assert table is app.screen.query_one("#queue PatchedTable")
        app.post_message(AppBlur())
        await settled(pilot)
        app.post_message(Updated(structs.replace(app.model, link=Link(LinkState.LOST))))
        await settled(pilot)
        app.post_message(AppFocus())
        await settled(pilot)
        assert app.focused is table
