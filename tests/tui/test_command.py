"""`mlx-stack tui` in a real terminal, and where there is none."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mlxstack.cli.commands import tui
from mlxstack.core.errors import SetupError
from mlxstack.tui.recording import RecordingFeed, RecordingWriter, new_recording, read_recording
from tests.patience import PATIENCE_S
from tests.tui import scenes

RUN = "import typer; from mlxstack.cli.commands import tui; typer.run(tui.tui)"


def test_without_a_terminal_it_says_what_to_use_instead() -> None:
    app = typer.Typer()
    app.command()(tui.tui)
    result = CliRunner().invoke(app, [])
    assert isinstance(result.exception, SetupError)
    assert "status --watch" in result.exception.message


async def recorded(path: Path) -> None:
    with new_recording(path) as file:
        async for _ in RecordingWriter(RecordingFeed("x", scenes.busy()[-3:]), file).news():
            pass


@pytest.mark.net
@pytest.mark.slow
async def test_h1_a_tape_plays_in_a_terminal_and_q_leaves(tmp_path: Path) -> None:
    tape = tmp_path / "busy.tape"
    await recorded(tape)
    assert len(read_recording(tape)) == 3
    code, seen = in_terminal(["--replay", str(tape), "--speed", "50"], tmp_path)
    assert code == 0
    for text in ("Overview", "claude-main", "has ended", r"[red]rm -r"):
        assert text in seen


def in_terminal(arguments: list[str], home: Path) -> tuple[int, str]:
    """Run it on a pseudo-terminal of 80x24 until the tape is over, then press q."""
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "MLX_STACK_HOME": str(home),
        "TERM": "xterm",
        "COLUMNS": "80",
        "LINES": "24",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    seen = b""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:
                break
        if b"has ended" in seen:
            os.write(ours, b"q")
    os.close(ours)
    return process.wait(PATIENCE_S), seen.decode(errors="replace")
