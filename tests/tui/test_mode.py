"""The mode of this computer, switched from a dashboard that is attached to one of its services."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.cli.local_machine import here
from mlxstack.client.client import Client
from mlxstack.host.home import Home
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import LiveFeed
from mlxstack.tui.screens.dialogs import TextDialog
from mlxstack.tui.theme import ThemeChoice
from tests.cli.terminal import Shell
from tests.tui.test_live import board, said, until

pytestmark = [pytest.mark.net, pytest.mark.slow]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """`day` is chat, `night` is chat and watch, `never` names a preset that is not there."""
    shell = Shell(tmp_path)
    folder = shell.home / "presets" / "modes"
    folder.mkdir(parents=True, mode=0o700)
    for name in ("chat", "watch"):
        (shell.home / "presets" / f"{name}.yaml").write_text(
            f"extends: demo\nserver: {{port: {shell.port}, drain_s: 1, startup_timeout_s: 20}}\n"
        )
    members = {"day": ("chat",), "night": ("chat", "watch"), "never": ("ghost",)}
    for mode, names in members.items():
        lines = "".join(f"  - preset: {one}\n" for one in names)
        (folder / f"{mode}.yaml").write_text(f"members:\n{lines}")
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    yield shell
    shell.kill()


async def test_h4_the_mode_is_switched_and_an_error_is_told(shell: Shell) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    url = shell.services()["day"]["url"]
    machine = here(Home(shell.home), "day")
    assert {"day", "night"} <= set(machine.modes)
    assert "watch" in machine.presets
    async with Client(url) as client:
        app = Dashboard(LiveFeed(client), client, ThemeChoice(), machine)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("M")
            assert isinstance(app.screen, TextDialog)
            await pilot.press(*"never", "enter")
            await until(pilot, lambda: said(board(pilot), "ghost"))
            await pilot.press("M")
            await pilot.press(*"nigh", "right", "enter")
            await until(pilot, lambda: said(board(pilot), "mode night runs"))
    found = shell.services()
    assert {one: found[one]["state"] for one in ("chat", "watch")} == {
        "chat": "healthy",
        "watch": "healthy",
    }
