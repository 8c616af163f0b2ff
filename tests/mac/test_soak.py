"""`verify --soak`: two streams with evictions, and one JSON of what they showed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlxstack.cli import doctor
from mlxstack.cli.main import app
from mlxstack.cli.verification import soak
from mlxstack.cli.verification.soak_record import SoakRecord
from mlxstack.core.errors import Broken
from mlxstack.host import diagnostic_reports
from mlxstack.host.diagnostic_reports import DiagnosticReport, reports_since
from mlxstack.host.home import Home
from mlxstack.host.parent_watchdog import VARIABLE
from mlxstack.host.services import read_json
from tests.models import LLAMA, write
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model whose rounds are short."""
    folder = tmp_path_factory.mktemp("models") / "small"
    return str(write(folder, LLAMA | {"num_hidden_layers": 1}))


def test_a_short_soak_of_the_demo_is_sound_and_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["verify", "--soak", "0.1s", "demo", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["is_sound"]
    assert report["n_evicted"] > 0
    assert report["n_compared"] >= 4
    assert report["n_different"] == 0
    assert report["longest_pause_s"] > 0
    assert 0 < report["active_bytes"] <= report["planned_bytes"] < report["memory_limit_bytes"]
    assert 0 < report["kv_bytes"] <= report["kv_budget_bytes"]
    assert {"machine", "versions"} <= set(report["conditions"])
    assert report["wired"] == "off"


def test_memory_beyond_the_plan_is_a_fault_although_the_machine_has_more(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_STACK_MEMORY", "2GiB")
    unplanned = mx.zeros(2**28, mx.uint32)
    mx.eval(unplanned)
    done = CliRunner().invoke(app, ["verify", "--soak", "0.1s", small, "--json"])
    assert done.exit_code != 0
    report = json.loads(done.stdout)
    assert not report["is_sound"]
    assert report["n_different"] == 0
    assert report["planned_bytes"] < report["active_bytes"] < report["memory_limit_bytes"]
    del unplanned


def darwin(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Reports as on macOS, from this folder."""
    patch.setattr(diagnostic_reports, "platform", SimpleNamespace(system=lambda: "Darwin"))
    patch.setattr(diagnostic_reports, "FOLDERS", (folder,))


def test_reports_of_panics_the_gpu_and_this_process_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reports_since(0, 77) is None
    darwin(monkeypatch, tmp_path)
    assert reports_since(0, 77) == ()
    panic = 'panic(cpu 4 caller 0x1): "completeMemory() prepare count underflow" @IOGPU.cpp:219'
    texts = {
        "panic-full-1.panic": json.dumps({"panicString": f"{panic}\nDebugger message"}),
        "gpuEvent-2.ips": "{}",
        "python-3.ips": '{"pid" : 77, "procName": "python"}',
        "python-4.crash": "Process: python3 [77]",
        "kernel-5.ips": "the IOGPU family",
        "python-6.ips": '{"pid" : 777}',
        "Safari-7.ips": "{}",
    }
    now = 1e9
    for n, (name, text) in enumerate(texts.items()):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (now + n, now + n))
    (tmp_path / "old.panic").touch()
    os.utime(tmp_path / "old.panic", (now - 60, now - 60))
    reports = reports_since(now, 77)
    assert reports is not None
    assert [Path(report.path).name for report in reports] == list(texts)[:5]
    assert reports[0].panic == panic
    assert not any(report.panic for report in reports[1:])


def test_a_panic_report_that_comes_during_the_soak_is_a_fault(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "old.panic").touch()
    os.utime(reports / "old.panic", (1, 1))
    darwin(monkeypatch, reports)

    def say(_: str) -> None:
        (reports / "IOGPU-restart.ips").touch()

    report = soak.soak(small, Home(tmp_path / "home"), os.environ, say, 0.1)
    assert report.reports == (DiagnosticReport(str(reports / "IOGPU-restart.ips")),)
    assert report.n_different == 0
    assert not report.is_sound


def test_a_soak_that_is_killed_is_told_by_doctor_and_by_the_next_one(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    env = {**os.environ, "MLX_STACK_HOME": str(home.root)}
    command = [sys.executable, "-m", "mlxstack.cli.main", "verify", "--soak", "1h", small]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: rounds_of(home))
            assert not list(doctor.unfinished(home)), "it runs"
        finally:
            process.kill()
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "panic-full-1.panic").write_text("panic(cpu 4 caller 0x1): underflow\nmore")
    darwin(monkeypatch, reports)
    (warning,) = doctor.unfinished(home)
    assert warning.verdict is doctor.CheckLevel.WARN
    assert "a soak of small for 1h00m ended after" in warning.detail
    assert "panic-full-1.panic: panic(cpu 4 caller 0x1): underflow" in warning.detail
    assert str(home.soak_file) in warning.remedy
    lines: list[str] = []
    report = soak.soak(small, home, os.environ, lines.append, 0.1)
    assert lines[0] == f"warn: {warning.detail}"
    assert report.interrupted is not None
    assert report.interrupted.record.n_rounds > 0
    assert report.interrupted.reports and "underflow" in report.interrupted.reports[0].panic
    assert not list(doctor.unfinished(home)), "this one ended"


def test_a_soak_ends_with_the_process_that_started_it_and_is_told(
    small: str, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    env = {**os.environ, "MLX_STACK_HOME": str(home.root), VARIABLE: "0"}
    command = [sys.executable, "-m", "mlxstack.cli.main", "verify", "--soak", "1h", small]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        wait_until(lambda: rounds_of(home))
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert list(doctor.unfinished(home))


def test_a_soak_that_fails_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)

    def fail(*_: object) -> None:
        raise Broken("the engine did not answer")

    monkeypatch.setattr(soak.Soaker, "run", fail)
    with pytest.raises(Broken):
        soak.soak("demo", home, os.environ, lambda _: None, 0.1)
    record = read_json(home.soak_file, SoakRecord)
    assert record is not None and record.has_ended
    assert not list(doctor.unfinished(home))


def rounds_of(home: Home) -> int | None:
    """Rounds in the record of a soak; None without one."""
    record = read_json(home.soak_file, SoakRecord)
    return record and record.n_rounds


@pytest.mark.parametrize("text", ["m", "15", "1h30m", "ten"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    done = CliRunner().invoke(app, ["verify", "--soak", text, "demo"])
    assert done.exit_code != 0
