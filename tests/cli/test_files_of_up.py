"""`up` is one straight line: it runs few files before the worker starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.net]

ROOT = Path(__file__).parents[2]

MAX_FILES_OF_UP = 24
"""Ideas from `up` to the worker: presets (5 files), model folders (3), fit (5), start, services."""


def test_up_runs_few_files_before_the_worker_starts(shell: Shell) -> None:
    # `-c`, so that the command runs in a process of its own.
    command = [sys.executable, "-c", "from tests.files_of_up import main; main()"]
    report = shell.folder / "files.json"
    up = subprocess.run(
        [*command, "up", "demo", "--port", str(shell.port)],
        env=shell.env | {"UP_FILES": str(report)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert up.returncode == 0, up.stderr
    assert shell.run("down", "demo").returncode == 0
    files = json.loads(report.read_text())
    assert {"cli/commands/up.py", "control/start.py", "host/services.py"} <= set(files)
    assert len(files) <= MAX_FILES_OF_UP, files
