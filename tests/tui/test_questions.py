"""Questions of a Mac owner, answered by the text of the screen."""

import re
from pathlib import Path

from textual.pilot import Pilot

from mlxstack.cli.services.local_machine import here
from mlxstack.core.status import StatusFrame
from mlxstack.host.home import Home, make_home
from mlxstack.tui.app import Dashboard
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.theme import ThemeChoice
from tests.tui import scenes, shots
from tests.tui.clerk import Clerk
from tests.tui.conftest import settled

QUESTIONS = (
    ("how much memory is left?", (), "5.4 GiB left of 36.0"),
    ("is the system short of memory?", (), "pressure calm · no swap"),
    ("what takes the memory?", (), "weights 16.1 ▓ live 5.9 ▒ parked 2.4 ░ work 1.1"),
    ("how fast does it write?", (), "68.0 tok/s"),
    ("when is the prompt of codex computed?", (), "codex · infra prefill 41.2k of 60.1k"),
    ("why does a request wait?", (), "slot 2 behind claude · shop-web"),
    ("how long has the oldest waited?", (), "oldest 12s"),
    ("what did reuse save?", (), "saved 2h04m"),
    ("which prompt changed, where?", (), "prompt changed at token 1,312: `Tuesday, 14:02`"),
    ("what lost the most time?", (), "8.10s codex · infra"),
    ("what would keep more KV?", (), "raise prefix_cache.memory_budget_pct"),
    ("whose is the largest shared prefix?", ("2",), "* You are Claude Code"),
    ("where is an idle agent?", ("3",), "qwen · lab parked"),
    ("which text did the request send?", ("tab", "tab", "enter"), "Tuesday, 14:09"),
)


def text(pilot: Pilot[None]) -> str:
    """The text of the whole screen."""
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


async def test_twelve_questions_are_answered_by_the_screen() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", shots.working()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for question, keys, answer in QUESTIONS:
            await pilot.press("1", *keys)
            await settled(pilot)
            seen = " ".join(text(pilot).split())
            assert answer in seen, (question, seen)


async def test_is_anything_loading() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", scenes.loading()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "loading qwen2.5-coder-14b" in text(pilot)
        assert "3.1/8.2 GiB, 4s so far, ETA 6s" in text(pilot)


async def test_an_empty_service_says_what_to_type() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", scenes.empty()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "mlx-stack run claude" in text(pilot)


async def test_a_table_is_searched_and_sorted() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", shots.working()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("3", "slash", *"claude", "enter")
        await settled(pilot)
        assert "with `claude`: 2 of 6" in text(pilot)
        assert "codex · infra" not in text(pilot)
        await pilot.press("slash", "backspace", "enter")
        await settled(pilot)
        assert "codex · infra" in text(pilot)
        await pilot.press("s", "s", "s")
        await settled(pilot)
        assert "by tokens" in text(pilot)
        places = [text(pilot).index(name) for name in ("61.9k", "41.2k", "21.2k", "13.3k", "9.8k")]
        assert places == sorted(places)


async def test_a_dialog_dims_the_screen_below() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", shots.working()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("E")
        await pilot.pause()
        assert "Erase" in text(pilot)
        assert "5.4 GiB left" in text(pilot)


async def test_the_log_of_another_computer_is_named() -> None:
    frame = shots.working()[-1]
    assert isinstance(frame, StatusFrame)
    app = Dashboard(RecordingFeed("127.0.0.1:7109", (frame,)), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert any("mlx-stack logs" in one.message for one in app._notifications)


async def test_the_model_dialog_lists_size_fit_and_download(tmp_path: Path) -> None:
    machine = here(Home(tmp_path))
    clerk = Clerk()
    feed = RecordingFeed("127.0.0.1:7109", shots.working()[-1:])
    app = Dashboard(feed, clerk, ThemeChoice(), machine)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("m")
        await settled(pilot)
        assert any("not downloaded" in line for line in text(pilot).splitlines())
        await pilot.press(*"demo")
        await settled(pilot)
        assert re.search(r"> demo .* on disk, fits", text(pilot))
        await pilot.press("ctrl+u", "down", "up", "down", "enter")
        await settled(pilot)
    assert [path for path, _, _ in clerk.asked] == ["/v1/models/load"]


async def test_the_log_is_shown_on_the_computer_of_the_service(tmp_path: Path) -> None:
    home = Home(tmp_path)
    make_home(home)
    log = home.log_file("coder")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("first line\nlast \x1b[31mline\n")
    feed = RecordingFeed("127.0.0.1:7109", shots.working()[-1:])
    app = Dashboard(feed, Clerk(), ThemeChoice(), here(home))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert "last \\x1b[31mline" in text(pilot)
