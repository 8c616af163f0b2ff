"""`status --line`, and the verbs of other tools."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxstack.cli.commands.status import line_of
from mlxstack.control.probe import ServiceHealthLevel, ServiceStatus, SystemStatus
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net


def status(name: str, level: ServiceHealthLevel, n_bytes: int = 0) -> ServiceStatus:
    return ServiceStatus(
        name, name, level, "", None, None, "", 1, 1, 1, 0, 0.0, "", memory_bytes=n_bytes
    )


def machine(*services: ServiceStatus) -> SystemStatus:
    return SystemStatus("M4", "macOS", 10, 1, 1, "", services)


def test_a_line_names_what_runs_and_what_is_wrong() -> None:
    level = ServiceHealthLevel
    assert line_of(machine(status("old", level.STOPPED))) == "mlx-stack: nothing runs"
    both = machine(status("demo", level.HEALTHY, 3 << 30), status("big", level.CRASHED))
    line = line_of(both)
    assert re.fullmatch(r"mlx-stack: demo, big crashed · 3\.0 GiB", line), line
    assert "|" not in line, "xbar reads parameters behind it"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("status", "--line"), "mlx-stack: nothing runs"),
        (("stop",), ""),
        (("list", "--json"), '"models"'),
        (("ps", "--json"), '"processes"'),
    ],
)
def test_verbs_that_people_type_from_habit(
    args: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    env = {**os.environ, "MLX_STACK_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-m", "mlxstack.cli.main", *args],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
