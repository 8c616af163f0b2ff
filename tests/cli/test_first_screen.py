"""`mlx-stack` alone: help in a pipe; state, recommended model and keys in a terminal."""

import re

import pytest

from tests.cli.pseudo_terminal import Terminal
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net


def test_a_pipe_gets_the_help(shell: Shell) -> None:
    done = shell.run()
    assert done.returncode == 2
    assert "Usage: mlx-stack" in done.stdout + done.stderr


def test_a_machine_without_a_service_recommends_one(shell: Shell) -> None:
    shell.env["MLX_STACK_MEMORY"] = "64GB"
    terminal = Terminal(shell)
    screen = terminal.until("Press a key")
    assert "no service runs" in screen
    assert re.search(r"\[u\] mlx-stack up \S+ .*recommended model, \d x 64k tokens", screen)
    assert "[d] mlx-stack up demo" in screen and "[p] mlx-stack plan" in screen
    terminal.press(b"p")
    terminal.until("> mlx-stack plan")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_another_key_leaves(shell: Shell) -> None:
    shell.env["MLX_STACK_MEMORY"] = "2GB"
    terminal = Terminal(shell)
    screen = terminal.until("Press a key")
    assert "[u]" not in screen and "[d] mlx-stack up demo" in screen
    terminal.press(b"x")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_a_running_service_is_shown_with_what_fits_it(served: Shell) -> None:
    terminal = Terminal(served)
    screen = terminal.until("Press a key")
    assert "tiny" in screen and "healthy" in screen
    assert "[c] mlx-stack chat" in screen and "[t] mlx-stack tui" in screen
    assert "run claude" not in screen, "a slot of 1k tokens"
    terminal.press(b"d")
    terminal.until("> mlx-stack down")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_up_ends_with_the_next_commands(shell: Shell) -> None:
    """Of those that fit the service, named once another one runs."""
    up = shell.up("--set", "slots.n_ctx=64k")
    url = f"http://127.0.0.1:{shell.port}/"
    commands = [line.split("  ")[1] for line in up.stdout.splitlines()[-5:-1]]
    assert commands == ["mlx-stack chat", "mlx-stack run claude", "mlx-stack tui", url]
    second = shell.up("--name", "second", "--port", "0")
    assert "  mlx-stack chat second " in second.stdout
    assert "  mlx-stack tui --name second " in second.stdout
    assert "run claude" not in second.stdout, "a slot of 1k tokens"
    shell.run("down", "second")
