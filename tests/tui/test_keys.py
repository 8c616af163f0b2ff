"""Keys, mouse, palette: what a person does, and what comes of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from mlxstack.core.engine_snapshot import SlotView, Snapshot
from mlxstack.core.status import AgentView, CacheView, PrefixView, RequestView, StatusFrame
from mlxstack.tui.actions import ACTIONS
from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.app import Dashboard, Updated
from mlxstack.tui.feed import News
from mlxstack.tui.help import help_lines
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.screens.agents import AgentScreen, AgentsScreen
from mlxstack.tui.screens.cache import CacheScreen
from mlxstack.tui.screens.dialogs import ConfirmDialog, TextDialog
from mlxstack.tui.screens.overview import TARGETS, OverviewScreen
from mlxstack.tui.screens.requests import RequestsScreen
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.state import Link, LinkState
from mlxstack.tui.theme import HOUSE, ThemeChoice, look_from
from mlxstack.tui.widgets.table import PatchedTable
from tests.patience import PATIENCE_S
from tests.tui import scenes
from tests.tui.conftest import offered, on_tape, settled
from tests.tui.slot_service import Clerk

pytestmark = pytest.mark.slow


def attached(clerk: Clerk, tape: tuple[News, ...] | None = None) -> Dashboard:
    return Dashboard(RecordingFeed("127.0.0.1:7109", tape or scenes.busy()), clerk, ThemeChoice())


def on_screen(app: Dashboard) -> str:
    """All text that a person sees."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def told(pilot: Pilot[Any]) -> list[str]:
    """The notifications, once all that was begun is done."""
    await settled(pilot)
    return [one.message for one in pilot.app._notifications]


async def test_the_number_keys_and_clicks_show_the_screens() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for key, screen in (
            ("2", CacheScreen),
            ("3", AgentsScreen),
            ("4", RequestsScreen),
            ("1", OverviewScreen),
        ):
            await pilot.press(key)
            assert type(app.screen) is screen
        await pilot.click("Tab", offset=(3, 0))
        assert isinstance(app.screen, OverviewScreen)
        await pilot.click(offset=(15, 0))
        assert isinstance(app.screen, CacheScreen)


async def test_every_screen_knows_the_model_as_soon_as_it_is_shown() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for key, name in (("2", "claude-code head"), ("3", "claude-main"), ("4", "opencode-2")):
            await pilot.press(key)
            await pilot.pause()
            assert name in on_screen(app)


async def test_h4_erase_is_asked_for_and_done_to_the_chosen_slot() -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("down", "E")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmDialog)
        assert "slot 1 of opencode-2, 6.9k tokens" in on_screen(app)
        assert clerk.asked == []
        await pilot.press("y")
        assert await told(pilot) == ["slot 1: 6912 tokens erased"]
    assert clerk.asked == [("erase", 1, "")]


async def test_the_keys_reach_the_table_again_after_it_lost_the_focus() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        app.screen.set_focus(None)
        app.post_message(Updated(structs.replace(app.model, link=Link(LinkState.LOST))))
        await settled(pilot)
        assert app.focused is app.screen.query_one("#slots PatchedTable")


async def test_keys_that_are_typed_in_one_breath_are_meant_for_the_row_they_moved_to() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for key, character in (("down", None), ("E", "E")):
            app.post_message(Key(key, character))
        await settled(pilot)
        assert "slot 1 of opencode-2, 6.9k tokens" in on_screen(app)


@pytest.mark.parametrize("refusal", ["n", "escape", "enter"])
async def test_h4_nothing_is_erased_without_consent(refusal: str) -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("E")
        await pilot.pause()
        await pilot.press(refusal)
        assert await told(pilot) == []
        assert isinstance(app.screen, OverviewScreen)
    assert clerk.asked == []


async def test_h4_save_proposes_the_agents_name_and_restore_reads_it_back() -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("S")
        await pilot.pause()
        assert isinstance(app.screen, TextDialog)
        assert app.screen.query_one(Input).value == "claude-main.kv"
        await pilot.press("enter")
        await settled(pilot)
        await pilot.press("down", "down", "R")
        await pilot.pause()
        await pilot.press("ctrl+u", *"claude-main.kv", "enter")
        first, second = await told(pilot)
    assert first.startswith("slot 0: 31204 tokens saved to claude-main.kv, ")
    assert second.startswith("slot 2: 31204 tokens restored from claude-main.kv, ")
    assert clerk.slots[2] == 31_204


async def test_h4_keys_that_come_fast_are_meant_for_the_question() -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("S", "ctrl+u", *"eye.kv", "enter")
        await settled(pilot)
    assert clerk.asked == [("save", 0, "eye.kv")]


async def test_h6_a_hostile_error_is_shown_literally() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("R")
        await pilot.pause()
        await pilot.press("enter")
        (said,) = await told(pilot)
        assert said == r"there is no slot file [b]claude-main.kv[/b] \x1b[31m"
        assert [one.severity for one in app._notifications] == ["error"]
        assert "[b]claude-main.kv[/b]" in on_screen(app)


async def test_h6_a_hostile_agent_is_shown_literally_everywhere() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(160, 40)) as pilot:
        await settled(pilot)
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
            assert r"[red]rm -rf[/] \x1b" in on_screen(app)
        await pilot.press("1", "down", "down", "E")
        await pilot.pause()
        assert r"[red]rm -rf[/] \x1b[31m" in on_screen(app)
        await pilot.press("escape", "S")
        await pilot.pause()
        assert app.screen.query_one(Input).value == "red-rm--rf------31m-evil.kv"


async def test_h6_a_hostile_agent_is_shown_literally_in_the_palette() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(160, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3", "down", "down", "down")
        await pilot.pause()
        assert app.chosen[ActionTarget.AGENT] == scenes.EVIL
        for text, first in (("", "Clear: cache"), ("delete", "Delete: agent")):
            await pilot.press("ctrl+p", *text)
            await offered(pilot, first)
            for sign in ("\x1b", "\u202e"):
                assert sign not in on_screen(app)
            if text:
                break
            await pilot.press("escape")
        assert r"Delete: agent [red]rm -rf[/] \x1b[31m\u202eevil\n" in on_screen(app)


async def test_copy_curl_copies_the_variable_and_never_the_key() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("down", "c")
        await settled(pilot)
        assert app.clipboard == (
            "curl -sS 'http://127.0.0.1:7109/slots/1?action=save' "
            '-H "Authorization: Bearer $MLX_STACK_API_KEY" -d \'{"filename": "slot-1.kv"}\''
        )


async def test_a_tape_cannot_be_changed() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("E")
        assert isinstance(app.screen, OverviewScreen)
        assert app.check_action("act", ("erase",)) is None
        await app.perform(ACTIONS[0], "0")
        assert await told(pilot) == ["Save: a recording cannot be changed"]


async def test_palette_footer_and_help_come_from_one_registry() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        keys = {one.binding.key: one.binding.description for one in app.active_bindings.values()}
        page = "\n".join("".join(cell.text for cell in line) for line in help_lines("overview", {}))
        for deed in ACTIONS:
            named = f"{deed.title or deed.label}: {deed.target}"
            assert any(title.startswith(named) for title in titles)
            is_here = deed.target in TARGETS
            assert (keys.get(deed.key) == deed.label) is is_here, deed
            assert deed.help in page
        assert {"Show overview", "Show cache", "Show agents", "Show requests"} <= set(titles)


async def test_the_palette_erases_the_slot_chosen_on_another_screen() -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("down", "2")
        await pilot.pause()
        commands = app.get_system_commands(app.screen)
        await next(one for one in commands if one.title == "Erase: slot 1").callback()
        await pilot.pause()
        await pilot.press("y")
        await settled(pilot)
    assert clerk.asked == [("erase", 1, "")]


async def test_a_question_mark_explains_each_screen() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 70)) as pilot:
        await settled(pilot)
        for key, word in (("1", "tiles"), ("2", "miss"), ("3", "conversation"), ("4", "finished")):
            await pilot.press(key, "question_mark")
            await pilot.pause()
            assert isinstance(app.screen, TextPage)
            assert word in on_screen(app)
            await pilot.press("escape")


async def test_enter_drills_into_an_agent_and_escape_comes_back() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("3", "enter")
        await pilot.pause()
        assert isinstance(app.screen, AgentScreen)
        assert "gpt-oss-20b" in on_screen(app)
        assert "▓" in on_screen(app)
        await pilot.press("escape")
        assert isinstance(app.screen, AgentsScreen)


async def test_in_a_low_terminal_deeds_are_done_to_what_can_be_seen() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 12)) as pilot:
        await settled(pilot)
        assert "[red]rm" in on_screen(app)
        await pilot.press("2")
        await settled(pilot)
        for text in ("claude-code he", "cached -> sent"):
            assert text in on_screen(app)
        await pilot.resize_terminal(80, 24)
        await settled(pilot)
        assert "Hit rates" in on_screen(app)


async def test_enter_tells_why_a_request_and_a_miss_were_computed() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("4", "down", "enter")
        await pilot.pause()
        assert "Tuesday, 14:09" in on_screen(app)
        await pilot.press("escape", "2", "tab", "tab", "enter")
        await pilot.pause()
        assert isinstance(app.screen, TextPage)
        assert "Today is" in on_screen(app)


async def test_the_cursor_stays_on_its_row_when_others_come_and_go() -> None:
    app = attached(Clerk(), (queue("a", "b", "c"),))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        slots = next(
            one for one in app.screen.query(PatchedTable) if one.parent and one.parent.id == "slots"
        )
        slots.focus()
        await pilot.press("down", "down")
        assert slots.chosen == "2"
        app.post_message(news(app, queue("x", "a", "b", "c", "d", first=1)))
        await pilot.pause()
        await pilot.pause()
        assert slots.chosen == "2"
        assert slots.row_count == 5


async def test_h5_the_cursor_is_where_it_was_after_a_restart() -> None:
    full = queue("a", "b", "c")
    none = StatusFrame(at=2.0)
    app = attached(Clerk(), (full,))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("down", "down")
        for one in (none, none, full):
            app.post_message(news(app, one))
            await pilot.pause()
            await pilot.pause()
        assert app.screen.query_one("#slots PatchedTable", PatchedTable).chosen == "2"
        assert app.chosen[ActionTarget.SLOT] == "2"


async def test_things_of_one_name_are_rows_of_their_own() -> None:
    twice = CacheView(prefixes=(PrefixView(""), PrefixView(""), PrefixView("#2"), PrefixView("")))
    agents = (AgentView("a"), AgentView("a"))
    requests = (RequestView("r"), RequestView("r"))
    app = on_tape((StatusFrame(1.0, cache=twice, agents=agents, requests=requests),))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for key, section, n_rows in (
            ("2", "prefixes", 4),
            ("3", "agents", 2),
            ("4", "requests", 2),
        ):
            await pilot.press(key)
            await pilot.pause()
            assert (
                app.screen.query_one(f"#{section} PatchedTable", PatchedTable).row_count == n_rows
            )


def styles_of(app: Dashboard, text: str) -> list[Any]:
    """Styles of the parts of the screen that hold these words."""
    strips = app.screen._compositor.render_strips()
    return [part.style for strip in strips for part in strip if text in part.text]


async def test_a_theme_is_kept_and_colours_the_cells_at_once(tmp_path: Path) -> None:
    path = tmp_path / "home" / "tui.json"
    app = Dashboard(RecordingFeed("X", scenes.busy()), None, look_from(path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        before = styles_of(app, "writing, 164 tokens")
        app.theme = "textual-light"
        await pilot.pause()
        assert len(before) == 1
        assert styles_of(app, "writing, 164 tokens") != before
    assert look_from(path).theme == "textual-light"


@pytest.mark.parametrize("content", ["", "{", '{"theme": 3}', '{"theme": "gone"}'])
async def test_a_damaged_or_unknown_theme_is_the_house_theme(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tui.json"
    path.write_text(content, encoding="utf-8")
    app = Dashboard(RecordingFeed("x", ()), None, look_from(path))
    async with app.run_test():
        assert app.theme == HOUSE.name


async def test_no_color_draws_greys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert "writing" in on_screen(app)
        colours = {
            style.color.triplet
            for strip in app.screen._compositor.render_strips()
            for segment in strip.apply_filter(app._filters[0], app.screen.styles.background)
            if (style := segment.style) and style.color and style.color.triplet
        }
        assert colours
        assert all(c.red == c.green == c.blue for c in colours)


async def test_unchanged_frames_draw_nothing() -> None:
    app = on_tape(scenes.empty())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        drawn = 0
        for widget in app.screen.query("SparklineChart, TextLines, PatchedTable"):
            refresh = widget.refresh

            def counted(*args: Any, _refresh: Any = refresh, **kw: Any) -> Any:
                nonlocal drawn
                drawn += 1
                return _refresh(*args, **kw)

            widget.refresh = counted  # type: ignore[method-assign]
        app.post_message(news(app, scenes.empty()[0]))
        await pilot.pause()
        assert drawn == 0


async def test_a_row_that_changes_is_drawn_alone() -> None:
    app = attached(Clerk(), (queue("a", "b", "c"),))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        table = app.screen.query_one("#slots PatchedTable", PatchedTable)
        drawn: list[int] = []
        render = table.render_line
        table.render_line = lambda y: drawn.append(y) or render(y)  # type: ignore[assignment,func-returns-value]
        app.post_message(news(app, queue("a", "x", "c")))
        await pilot.pause()
        await pilot.pause()
        assert table.get_row("1")[1].plain == "x"
        assert drawn == [2]
        assert "x" in on_screen(app)


def queue(*agents: str, first: int = 0) -> StatusFrame:
    """A service with a slot for each of these agents."""
    slots = tuple(SlotView(i, 4096, agent=agent) for i, agent in enumerate(agents, -first))
    return StatusFrame(at=1.0, snapshot=Snapshot(slots=slots))


def news(app: Dashboard, frame: StatusFrame) -> Any:
    """The message that the feed would post."""
    from mlxstack.tui.app import Updated
    from mlxstack.tui.state import reduce

    return Updated(reduce(app.model, frame))


async def test_a_prefix_is_let_go_and_the_cache_is_cleared() -> None:
    clerk = Clerk()
    app = attached(clerk)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("2", "tab", "down", "down", "u")
        await pilot.pause()
        assert "Unpin [red]rm -rf[/]" in on_screen(app)
        await pilot.press("y")
        await settled(pilot)
        await pilot.press("X", "y")
        assert (await told(pilot))[-1] == "the cache is cleared: 3.0 GiB freed"
    assert clerk.asked == [("/cache/prefixes/p3", 0, ""), ("/cache/clear", 0, "")]


async def test_the_palette_goes_to_a_screen() -> None:
    app = on_tape(scenes.busy())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("ctrl+p", *"show cache")
        await offered(pilot, "Show cache")
        await pilot.press("enter")
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(app.screen, CacheScreen):
                await pilot.pause(0.02)


async def test_no_key_leads_away_from_a_question() -> None:
    app = attached(Clerk())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("E", "2")
        assert isinstance(app.screen, ConfirmDialog)
