"""Plugin of pytest: run the tests of SUITE_IDS, and write their outcomes to SUITE_OUTCOMES."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

SHIM = Path(__file__).with_name("shim.py")


def pytest_configure() -> None:
    """Have `llama-server` forked: a start takes seconds else."""
    forked.install()
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start_shim(self: Any, args: Any, *positional: Any) -> None:
        if args[0] == str(SHIM):
            args = [sys.executable, *args]
        start(self, args, *positional)

    subprocess.Popen._execute_child = start_shim  # type: ignore[attr-defined]
    os.environ["LLAMA_SERVER_BIN_PATH"] = str(SHIM)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the listed tests, and download no models for them."""
    sys.modules["utils"].ServerPreset.load_all = lambda: None  # type: ignore[attr-defined]
    listed = set(Path(os.environ["SUITE_IDS"]).read_text(encoding="utf-8").splitlines())
    unlisted = [item for item in items if item.nodeid not in listed]
    items[:] = [item for item in items if item.nodeid in listed]
    config.hook.pytest_deselected(items=unlisted)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for a call, and for a fault before or after it."""
    if report.when == "call" or report.outcome != "passed":
        line = json.dumps({"id": report.nodeid, "outcome": report.outcome})
        with Path(os.environ["SUITE_OUTCOMES"]).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
