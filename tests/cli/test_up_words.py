"""Words of `up` about the context, an interrupt, and a service that runs already."""

import os
import signal

import pytest

from tests.cli.terminal import Shell
from tests.cli.test_chat import Terminal

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_a_context_beyond_the_training_is_warned_of(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    up = shell.up("--ctx", "64k", "--slots", "1")
    assert up.returncode == 0, up.stderr
    assert "warning: trained for 4096 tokens" in up.stderr
    assert shell.run("down").returncode == 0
    assert "trained for" not in shell.up().stderr


def test_an_interrupted_up_says_that_the_service_is_stopped(shell: Shell) -> None:
    shell.env["WORKER_MODE"] = "slow"
    terminal = Terminal(shell, "up", str(shell.preset))
    terminal.until("starting tiny")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until("interrupted; tiny is stopped")
    assert terminal.process.wait(60) == 130
    assert shell.own_processes() == []
