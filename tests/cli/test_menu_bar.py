"""`status --line`, the verbs of other tools, and the dashboard for Grafana."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mlxstack.cli.commands.status import line_of
from mlxstack.control.probe import ServiceHealthLevel, ServiceStatus, SystemStatus
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"(?:mlxstack_|llamacpp:)[a-z_]+")

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


@pytest.mark.mlx
def test_each_metric_of_the_dashboard_exists(tmp_path: Path) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    queries = [query["expr"] for panel in board["panels"] for query in panel["targets"]]
    named = {name for one in queries for name in METRIC.findall(one)}
    assert len(queries) >= 10 and all(METRIC.search(one) for one in queries)
    with running(tiny_preset(tmp_path / "model"), tmp_path / "home") as here:
        text = httpx.get(here.url + "/metrics", timeout=PATIENCE_S).text
    known = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert named <= known, named - known
