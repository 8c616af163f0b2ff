"""A limit of open files that is too low is told before mlx-lm is imported, and put back after."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S

IMPORT = """
import resource
from mlxstack.host.descriptors import kept_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
with kept_limit():
    import mlx_lm
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(soft == hard, hard)
"""
BELOW = ("bash", "-c", 'ulimit -n 1024 && exec "$@"', "bash")
"""Run what follows with a hard limit of 1,024 open files."""
CAN_RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
"""


def may_raise() -> bool:
    done = subprocess.run([sys.executable, "-c", CAN_RAISE], capture_output=True, check=False)
    return done.returncode == 0


unprivileged = pytest.mark.skipif(may_raise(), reason="this user may raise any limit")


@pytest.mark.mlx
def test_the_import_of_mlx_lm_does_not_lower_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    same, hard = done.stdout.split()
    assert same == "True"
    assert int(hard) >= 4096


@unprivileged
@pytest.mark.net
def test_a_limit_too_low_ends_the_worker_for_good_with_words(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    done = subprocess.run(
        [*BELOW, *CLI, "up", str(shell.preset)],
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "ulimit -Hn`) is 1024, and mlx-lm needs 4096" in done.stderr
    log = (shell.home / "logs" / "tiny.log").read_text()
    assert "exited with 78" in log
    assert "starting again" not in log
    assert shell.own_processes() == []


@unprivileged
def test_doctor_tells_the_limit(tmp_path: Path) -> None:
    for command, check, told in (
        (CLI, "ok", "ulimit -n is "),
        ((*BELOW, *CLI), "bad", "ulimit -n is 1024, at most 1024"),
    ):
        done = subprocess.run(
            [*command, "doctor", "--json"],
            env=Shell(tmp_path).env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        found = {one["subject"]: one for one in json.loads(done.stdout)["findings"]}
        assert found["open files"]["verdict"] == check
        assert told in found["open files"]["detail"]
