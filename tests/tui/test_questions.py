"""Questions of a Mac owner, answered by the text of the screen."""

import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs
from textual.pilot import Pilot

from mlxstack.cli.local_machine import here
from mlxstack.core.status import LoadView, StatusFrame
from mlxstack.host.home import Home, make_home
from mlxstack.host.log_lines import LogLine, text_of
from mlxstack.tui.actions import ACTIONS
from mlxstack.tui.actions.action import ActionInput
from mlxstack.tui.app import Dashboard
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.screens.dialogs import TextDialog
from mlxstack.tui.theme import ThemeChoice
from tests.patience import PATIENCE_S, until
from tests.tui import scenes, shots
from tests.tui.conftest import settled
from tests.tui.slot_service import Clerk

pytestmark = pytest.mark.slow

GIB = 2**30
QUESTIONS = (
    ("how much memory is left?", (), "5.4 GiB left of 36.0"),
    ("is the system short of memory?", (), "pressure calm · no swap"),
    ("what takes the memory?", (), "weights 16.1 ▓ live 5.9 ▒ parked 2.4 ░ work 1.1"),
    ("what do other programs take?", (), "- others 5.1 GiB"),
    ("how long does a first token take?", (), "median 3.19s, 95% 9.43s"),
    ("where did the time go?", ("4", "down", "down", "enter"), "- waited for other prompts 1.24s"),
    ("how fast does it write?", (), "68.0 tok/s"),
    ("when is the prompt of codex computed?", (), "codex · infra prefill 41.2k of 60.1k"),
    ("why does a request wait?", (), "slot 2 behind claude · shop-web"),
    ("how long has the oldest waited?", (), "oldest 12s"),
    ("what did reuse save?", (), "saved 2h04m"),
    ("which prompt changed, where?", (), "prompt changed at token 1312: `Tuesday, 14:02`"),
    ("what lost the most time?", (), "8.10s codex · infra"),
    ("what would keep more KV?", (), "raise prefix_cache.memory_budget_pct"),
    ("what would free memory?", ("2",), "X frees up to 2.4 GiB"),
    ("is anything downloading?", (), "downloading qwen3-coder-next ███"),
    ("how long does the download take?", (), "12.4/44.8 GiB, 2m20s so far, ETA 6m05s"),
    ("which prompt costs an agent its reuse?", ("3",), "diverged"),
    ("whose is the largest shared prefix?", ("2",), "* You are Claude Code"),
    ("where is an idle agent?", ("3",), "qwen · lab parked"),
    ("which text did the request send?", ("tab", "tab", "enter"), "Tuesday, 14:09"),
)


def text(pilot: Pilot[None]) -> str:
    """The text of the whole screen."""
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


async def test_twelve_questions_are_answered_by_the_screen() -> None:
    *before, last = shots.working()
    assert isinstance(last, StatusFrame)
    download = LoadView(
        "qwen3-coder-next", round(12.4 * GIB), round(44.8 * GIB), 140.0, is_download=True
    )
    tape = (*before, structs.replace(last, loading=download))
    app = Dashboard(RecordingFeed("127.0.0.1:7109", tape), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for question, keys, answer in QUESTIONS:
            await pilot.press("escape", "1", *keys)
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
        before = color_of(pilot, "5.4 GiB left")
        await pilot.press("E")
        await pilot.pause()
        assert "Erase" in text(pilot)
        assert color_of(pilot, "5.4 GiB left") < before


def color_of(pilot: Pilot[None], text: str) -> int:
    """Brightness of some text on the screen."""
    strips = pilot.app.screen._compositor.render_strips()
    parts = [part for strip in strips for part in strip if text in part.text]
    style = parts[0].style
    assert style is not None and style.color is not None
    return sum(style.color.get_truecolor())


async def test_the_log_of_another_computer_is_named() -> None:
    frame = shots.working()[-1]
    assert isinstance(frame, StatusFrame)
    app = Dashboard(RecordingFeed("127.0.0.1:7109", (frame,)), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert any("mlx-stack logs" in one.message for one in app._notifications)


async def test_a_choice_says_measuring_until_it_is_described() -> None:
    described = threading.Event()

    def describe() -> dict[str, str]:
        described.wait(PATIENCE_S)
        return {"demo": "3.3 MiB"}

    app = Dashboard(RecordingFeed("127.0.0.1:7109", scenes.empty()), Clerk(), ThemeChoice())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await app.push_screen(TextDialog("Which?", choices=("demo",), describe=describe))
        await until(lambda: "demo  measuring" in text(pilot))
        described.set()
        await until(lambda: "demo  3.3 MiB" in text(pilot))


async def test_the_model_dialog_lists_size_fit_and_download(tmp_path: Path) -> None:
    machine = structs.replace(here(Home(tmp_path), "coder"), presets=("demo", "qwen3-coder-next"))
    clerk = Clerk()
    feed = RecordingFeed("127.0.0.1:7109", shots.working()[-1:])
    app = Dashboard(feed, clerk, ThemeChoice(), machine)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("m")
        await settled(pilot)
        told = text(pilot)
        sized = r"[\d.]+ (?:MiB|GiB)"
        assert re.search(rf"qwen3-coder-next +{sized} +(fits|too big) +not downloaded ", told)
        await pilot.press(*"demo")
        await settled(pilot)
        assert re.search(rf"> demo +{sized} +fits +on disk ", text(pilot))
        await pilot.press("ctrl+u", "down", "up", "down", "enter")
        await settled(pilot)
    assert [path for path, _, _ in clerk.asked] == ["/v1/models/load"]


async def test_the_log_is_shown_on_the_computer_of_the_service(tmp_path: Path) -> None:
    home = Home(tmp_path)
    make_home(home)
    # A swap of the model gives the frames the name of another preset.
    log = home.log_file("desk")
    log.parent.mkdir(parents=True, exist_ok=True)
    error = LogLine(
        time=datetime.now(UTC), level="ERROR", message="a step failed", traceback="odd\nValueError"
    )
    log.write_text("first line\n" * 100 + f"last \x1b[31mline\n{text_of(error)}\n")
    feed = RecordingFeed("127.0.0.1:7109", shots.working()[-1:])
    app = Dashboard(feed, Clerk(), ThemeChoice(), here(home, "desk"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert "last \\x1b[31mline" in text(pilot)
        [failure] = [line for line in text(pilot).splitlines() if "ERROR a step failed" in line]
        assert "ValueError" in text(pilot) and "ValueError" not in failure
        assert "\\n" not in text(pilot)


async def test_a_key_means_the_same_everywhere_and_destructive_ones_ask_in_the_palette() -> None:
    app = Dashboard(RecordingFeed("127.0.0.1:7109", shots.working()), Clerk(), ThemeChoice())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        meanings: dict[str, set[str]] = {}
        for screen in "1234":
            await pilot.press(screen)
            for one in app.active_bindings.values():
                meanings.setdefault(one.binding.key, set()).add(one.binding.description)
                destructive = {each.key for each in ACTIONS if each.is_destructive}
                assert not (one.binding.key in destructive and one.binding.show)
        assert {key: told for key, told in meanings.items() if len(told) > 1} == {}
        titles = [command.title for command in app.get_system_commands(app.screen)]
    assert {"Swap model: service", "Switch mode: machine"} < set(titles)
    labels: dict[str, set[str]] = {}
    for action in ACTIONS:
        labels.setdefault(action.key, set()).add(action.label)
        assert any(title.startswith(f"{action.title or action.label}: ") for title in titles)
        if action.is_destructive:
            assert action.key.isupper()
            assert action.wants is not ActionInput.NOTHING
    assert all(len(told) == 1 for told in labels.values())
