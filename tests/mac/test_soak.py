"""`verify --soak`: two streams with evictions, and one JSON of what they showed."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.cli.verification import soak
from mlxstack.host.home import Home

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


def test_a_short_soak_of_the_demo_is_sound_and_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["verify", "--soak", "3s", "demo", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["is_sound"]
    assert found["n_evicted"] > 0
    assert found["n_compared"] >= 4
    assert found["n_different"] == 0
    assert found["longest_pause_s"] > 0
    assert 0 < found["active_bytes"] <= found["planned_bytes"] < found["memory_limit_bytes"]
    assert 0 < found["kv_bytes"] <= found["kv_budget_bytes"]
    assert {"machine", "versions"} <= set(found["conditions"])
    assert found["wired"] == "off"


def test_memory_beyond_the_plan_is_a_fault_although_the_machine_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_STACK_MEMORY", "2GiB")
    unplanned = mx.zeros(2**28, mx.uint32)
    mx.eval(unplanned)
    done = CliRunner().invoke(app, ["verify", "--soak", "1s", "demo", "--json"])
    assert done.exit_code != 0
    found = json.loads(done.stdout)
    assert not found["is_sound"]
    assert found["n_different"] == 0
    assert found["planned_bytes"] < found["active_bytes"] < found["memory_limit_bytes"]
    del unplanned


def test_only_new_panic_reports_of_a_mac_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert soak.panic_files() is None
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(soak, "REPORTS", tmp_path)
    assert soak.panic_files() == set()
    for name in ("panic-full-2026-11-25.panic", "IOGPU-restart.ips", "Safari.ips"):
        (tmp_path / name).touch()
    assert soak.panic_files() == {"panic-full-2026-11-25.panic", "IOGPU-restart.ips"}


def test_a_panic_report_that_comes_during_the_soak_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "old.panic").touch()
    monkeypatch.setattr(soak, "REPORTS", reports)
    monkeypatch.setattr(soak, "platform", SimpleNamespace(system=lambda: "Darwin"))

    def say(_: str) -> None:
        (reports / "IOGPU-restart.ips").touch()

    found = soak.soak("demo", Home(tmp_path / "home"), os.environ, say, 0.1)
    assert found.panics == ("IOGPU-restart.ips",)
    assert found.n_different == 0
    assert not found.is_sound


@pytest.mark.parametrize("text", ["m", "15", "1h30m", "ten"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    done = CliRunner().invoke(app, ["verify", "--soak", text, "demo"])
    assert done.exit_code != 0
