"""Runs the test of a repair in a limited child.

The code under test was written by a model. The child has a folder of its own, an empty
environment, limits of time, memory, files and processes, and no network where the system has a way
to take it: a namespace on Linux, `sandbox-exec` on a Mac. A hook of Python's refuses sockets,
other processes and writing outside the folder; it stops accidents, not an attacker.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from mlxstack.cli.verification.tools import guarded_child

TIMEOUT_S = 20.0
MAX_OUTPUT = 600
"""Characters of the output that are given back, the last ones."""
NO_NETWORK = "(version 1)(allow default)(deny network*)"
"""Profile for `sandbox-exec` of macOS."""


class TestOutcome(Struct, frozen=True):
    """Whether a test passed, and the end of its output."""

    __test__ = False

    has_passed: bool
    output: str


def run_test(files: Mapping[str, str], test: str, timeout_s: float = TIMEOUT_S) -> TestOutcome:
    """Run a test beside these files, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mlx-stack-repair-") as folder:
        root = Path(folder).resolve()
        for name, text in {**files, guarded_child.TEST_FILE: test}.items():
            (root / name).write_text(text, encoding="utf-8")
        with (root / "output").open("w+b") as output:
            child = subprocess.Popen(
                _command(root),
                cwd=root,
                env={"PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            has_ended = _ends(child, timeout_s)
            output.seek(0)
            text = output.read().decode(errors="replace").replace(f"{root}/", "").strip()
    if not has_ended:
        text = f"{text}\nthe test did not end within {timeout_s:g} s".strip()
    return TestOutcome(has_ended and child.returncode == 0, text[-MAX_OUTPUT:])


def _command(root: Path) -> list[str]:
    command = [sys.executable, "-I", guarded_child.__file__, str(root)]
    sandbox = shutil.which("sandbox-exec")
    if sandbox is not None:
        return [sandbox, "-p", NO_NETWORK, *command]
    return command


def _ends(child: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Whether a child ends in time; its session ends anyway."""
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    else:
        return True
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
