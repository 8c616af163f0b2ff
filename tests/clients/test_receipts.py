"""Receipts of turns in Claude Code, opencode and pi, started by `run`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.running import Running
from tests.clients.agents import (
    DONE,
    N_CTX,
    SCRIPT,
    TASK,
    Start,
    command,
    environment,
    installed,
    project,
)
from tests.clients.stage import playing
from tests.tui.pane import Pane

pytestmark = [
    pytest.mark.client,
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
OWN = "my own line"
REUSED = " reused, "


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("receipts"), SCRIPT, n_ctx=N_CTX) as service:
        yield service


def pane_of(client: str, live: Running, folder: Path, *options: str) -> Pane:
    """The client in a terminal, past its first questions."""
    installed(client)
    place = project(folder)
    argv, variables = command(client, live.url, folder, Start.RUN)
    argv[-1:-1] = options
    if client == "claude":
        argv += ["--dangerously-skip-permissions"]
    variables = environment(folder, **variables)
    trusted = {
        "hasCompletedOnboarding": True,
        "bypassPermissionsModeAccepted": True,
        "projects": {str(place): {"hasTrustDialogAccepted": True}},
    }
    (folder / "home" / ".claude.json").write_text(json.dumps(trusted))
    return Pane(place, argv, variables)


def ask(pane: Pane, client: str, ready: str) -> None:
    """Task of a person, once the client is ready."""
    task = TASK.format(client)
    pane.shows(ready)
    pane.write(task)
    pane.shows(task)
    pane.press("Enter")
    pane.shows(REUSED)


def last_line(live: Running) -> str:
    """Beginning of the last receipt that the service gives."""
    line: str = httpx.get(f"{live.url}/receipts").json()["line"]
    return line.partition(", first")[0]


def test_claude_code_shows_the_receipt_in_its_status_line(live: Running, tmp_path: Path) -> None:
    pane = pane_of("claude", live, tmp_path)
    try:
        ask(pane, "claude", "bypass permissions")
        pane.shows(DONE)
        pane.until(lambda seen: last_line(live) in seen, "the last receipt")
    finally:
        pane.close()


def test_claude_code_keeps_a_status_line_above_the_receipt(live: Running, tmp_path: Path) -> None:
    settings = tmp_path / "home" / ".claude" / "settings.json"
    settings.parent.mkdir(parents=True)
    line = {"type": "command", "command": f"cat > /dev/null; echo '{OWN}'"}
    settings.write_text(json.dumps({"statusLine": line}))
    pane = pane_of("claude", live, tmp_path, "--receipt", "wrap")
    try:
        ask(pane, "claude", "bypass permissions")
        assert OWN in pane.text()
    finally:
        pane.close()


@pytest.mark.parametrize(("client", "ready"), [("opencode", "ctrl+p"), ("pi", "local-model")])
def test_opencode_and_pi_show_the_receipt(
    live: Running, tmp_path: Path, client: str, ready: str
) -> None:
    pane = pane_of(client, live, tmp_path)
    try:
        ask(pane, client, ready)
    finally:
        pane.close()
