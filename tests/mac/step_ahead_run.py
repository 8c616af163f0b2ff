"""Runs tests in a child process with `step_ahead_plugin`."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "pytest", "-q", "-p", "tests.mac.step_ahead_plugin", "-p", "no:cacheprovider"]


def run_ahead(precision: str, paths: Sequence[str], *options: str) -> int:
    """How many of these tests passed, a step ahead in this precision; none may fail."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *COMMAND, *options, *paths],
        cwd=ROOT,
        env={**env, "TESTS_AHEAD": precision},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    return int(passed[1])
