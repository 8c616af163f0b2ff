"""`verify --mac`: to its end here and as Darwin imitated, and told after a kill."""

import json
import os
import plistlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mlxstack.cli import doctor
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.main import app
from mlxstack.cli.verification.child import ChildEnd, run_child
from mlxstack.cli.verification.mac_report import MacReport, PartResult, ReportFile
from mlxstack.cli.verification.mac_run import summary
from mlxstack.host.command_buffers import MAX_OPERATIONS, OPERATIONS
from mlxstack.host.home import Home
from mlxstack.host.process import is_alive
from mlxstack.host.services import read_json
from tests.models import LLAMA, write
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

PARTS = ["doctor", "kernels", "verify", "measurements", "soak"]
SHORT = ["--quick", "--measure", "4s", "--soak", "0.1s"]
"""A soak runs one round at least."""
COMMAND = [sys.executable, "-m", "mlxstack.cli.main"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def env(home: Home) -> dict[str, str]:
    return {**os.environ, "MLX_STACK_HOME": str(home.root)}


@pytest.fixture
def darwin(tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    """Variables for processes that take this computer for a Mac."""
    version = tmp_path / "SystemVersion.plist"
    version.write_bytes(plistlib.dumps({"ProductVersion": "26.2", "ProductBuildVersion": "25C56"}))
    cores = tmp_path / "cores.plist"
    cores.write_bytes(plistlib.dumps([{"IOClass": "AGXAcceleratorG15X", "gpu-core-count": 40}]))
    texts = {
        "sysctl": "echo 0",
        "cat": f"/bin/cat {version}",
        "ioreg": f"/bin/cat {cores}",
        "pmset": "echo ' lowpowermode         0'",
        "notifyutil": "echo com.apple.system.thermalpressurelevel 1",
        "caffeinate": f"echo $* >> {tmp_path / 'caffeinated'}",
    }
    programs = tmp_path / "programs"
    reports = tmp_path / "reports"
    programs.mkdir()
    reports.mkdir()
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return env | {
        "PYTHONPATH": with_path(Path(__file__).parent / "darwin", env),
        "IMITATED_PROGRAMS": str(programs),
        "IMITATED_REPORTS": str(reports),
        "MLX_STACK_CPU": "1",
    }


def with_path(folder: Path, env: Mapping[str, str]) -> str:
    """Folders of modules, this one first."""
    return os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))


def run(env: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments],
        env=env,
        text=True,
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )


def report_of(home: Home) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(home.mac_report_file.read_bytes())
    return report


def check_parts(home: Home, done: "subprocess.CompletedProcess[str]", limits: list[str]) -> None:
    """All parts ended well, with their results in one report."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"send this file in an issue of mlx-stack:\n  {home.mac_report_file}" in done.stdout
    report = report_of(home)
    assert report["has_ended"]
    assert [part["name"] for part in report["parts"]] == PARTS
    assert {part["exit_code"] for part in report["parts"]} == {0}
    assert {"machine", "versions", "before", "after"} <= report["conditions"].keys()
    results = {part["name"]: part["result"] for part in report["parts"]}
    assert results["doctor"]["findings"]
    assert {"attention", "rope"} <= {check["name"] for check in results["kernels"]["checks"]}
    assert any("past 1,024" in check["subject"] for check in results["verify"]["checks"])
    measured = results["measurements"]
    buffers = [
        measurement["figures"]
        for measurement in measured
        if measurement["name"] == "command buffers"
    ]
    assert [measurement[MAX_OPERATIONS] for measurement in buffers] == limits
    names = {measurement["name"] for measurement in measured}
    assert {"prefill", "dispatch", "bit table", "idle penalty", "forced attention"} <= names
    steps = [
        measurement["figures"] for measurement in measured if measurement["name"] == "decode step"
    ]
    assert {(step["rows"], step["keys"]) for step in steps} >= {
        (n_rows, n_keys) for n_rows in (1, 2, 4, 8) for n_keys in (1024, 8192, 32768)
    }
    assert all({"step_ms", "host_ms"} <= step.keys() for step in steps[:2])
    assert any("no time left" in measurement["left_out"] for measurement in measured), (
        "a bounded budget"
    )
    assert results["soak"]["n_answers"] > 0
    assert not list(doctor.unfinished(home))


@pytest.mark.soak
def test_all_parts_run_to_their_end_on_linux(home: Home, env: dict[str, str]) -> None:
    done = run(env, "verify", "--mac", "demo", *SHORT)
    check_parts(home, done, ["40", str(OPERATIONS), "MLX's own"])


def test_all_parts_run_to_their_end_as_on_a_mac(
    home: Home, darwin: dict[str, str], tmp_path: Path
) -> None:
    model = write(tmp_path / "small", LLAMA | {"num_hidden_layers": 1})
    done = run(darwin, "verify", "--mac", str(model), *SHORT)
    check_parts(home, done, ["50", str(OPERATIONS), str(OPERATIONS)])
    report = report_of(home)
    conditions = report["conditions"]
    assert conditions["macos"] == "macOS 26.2 (25C56)"
    assert conditions["machine"].startswith("Apple M3 Max")
    assert conditions["before"]["is_low_power"] is False
    assert conditions["after"]["thermal_level"] == 1
    subjects = {finding["subject"] for finding in report["parts"][0]["result"]["findings"]}
    assert {"macos", "gpu memory"} <= subjects
    assert report["parts"][-1]["result"]["reports"] == []
    assert "-i -w" in (tmp_path / "caffeinated").read_text()


def test_a_run_that_is_killed_is_named_by_doctor_and_kept(home: Home, env: dict[str, str]) -> None:
    command = [*COMMAND, "verify", "--mac", "demo", "--quick"]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: PARTS[1] in parts_of(home))
            children = wait_until(psutil.Process(process.pid).children)
        finally:
            process.kill()
    for child in children:
        child.kill()
    checked = run(env, "doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(checked.stdout)["findings"]}
    assert "in its kernels" in findings["verify --mac"]["detail"]
    report = read_json(home.mac_report_file, MacReport)
    assert report is not None and not report.has_ended and not is_alive(report.process)
    assert [(part.name, part.exit_code) for part in report.parts] == [
        ("doctor", 0),
        (PARTS[1], None),
    ]
    assert report.parts[0].result["findings"], "the parts before are kept"
    check_is_kept(home, report)


@pytest.mark.soak
def test_a_run_that_is_killed_in_its_soak_is_told_by_doctor_and_kept(
    home: Home, darwin: dict[str, str]
) -> None:
    command = [*COMMAND, "verify", "--mac", "demo", "--quick", "--measure", "1s", "--soak", "1h"]
    with subprocess.Popen(command, env=darwin, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: home.soak_file.is_file() and soak_rounds(home))
        finally:
            process.kill()
    soak = json.loads(home.soak_file.read_bytes())["process"]
    wait_until(lambda: not Path(f"/proc/{soak['pid']}").exists(), "the soak ends with its parent")
    panic = "panic(cpu 4 caller 0x1): completeMemory() prepare count underflow"
    reports = Path(darwin["IMITATED_REPORTS"])
    (reports / "panic-full-1.panic").write_text(f"{panic} @IOGPU\n")
    checked = run(darwin, "doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(checked.stdout)["findings"]}
    assert "a soak of demo for 1h00m ended after" in findings["soak"]["detail"]
    assert f"panic-full-1.panic: {panic}" in findings["soak"]["detail"]
    assert "in its soak" in findings["verify --mac"]["detail"]
    report = read_json(home.mac_report_file, MacReport)
    assert report is not None and not report.has_ended and not is_alive(report.process)
    assert [part.name for part in report.parts] == PARTS
    assert [part.exit_code for part in report.parts[:-1]] == [0] * 4, "the parts before are kept"
    check_is_kept(home, report)


def check_is_kept(home: Home, report: MacReport) -> None:
    """The next run leaves the report of one that was killed."""
    later = ReportFile(home, "demo", report.conditions)
    before = read_json(Path(later.report.before), MacReport)
    assert before == report, "the report of an interrupted run is kept"
    assert not list(doctor.unfinished(home))[1:], "this one runs"


def parts_of(home: Home) -> list[str]:
    """Names of the parts that have begun."""
    report = read_json(home.mac_report_file, MacReport)
    return [part.name for part in report.parts] if report else []


def soak_rounds(home: Home) -> int:
    """Rounds in the record of the soak."""
    rounds: int = json.loads(home.soak_file.read_bytes())["n_rounds"]
    return rounds


def test_a_child_that_a_signal_ends_leaves_its_lines() -> None:
    """As when MLX aborts the process."""
    code = "import os, sys; print(input()); print('last', file=sys.stderr, flush=True); os.abort()"
    printed: list[str] = []
    lines: list[bytes] = []
    command = [sys.executable, "-uc", code]
    end = run_child(command, os.environ, PATIENCE_S, printed.append, lines.append, b"question")
    assert end == ChildEnd(-signal.SIGABRT, ("last",))
    assert printed == ["last"] and lines == [b"question\n"]


def test_a_child_ends_with_the_process_that_runs_it() -> None:
    child = (
        "import os, sys, threading\n"
        "from mlxstack.host.parent_watchdog import follow_supervisor\n"
        "input()\n"
        "follow_supervisor(os.environ)\n"
        "print(os.getpid(), flush=True)\n"
        "threading.Event().wait()\n"
    )
    parent = (
        "import os, sys\n"
        "from mlxstack.cli.verification.child import run_child\n"
        "command = [sys.executable, '-c', sys.argv[1]]\n"
        "run_child(command, os.environ, 1e6, print, lambda line: os.write(1, line))\n"
    )
    command = [sys.executable, "-c", parent, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
        finally:
            process.kill()
    try:
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the child ends with its parent")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_child_beyond_its_limit_is_killed() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    end = run_child(command, os.environ, 0.1, lambda _: None, lambda _: None)
    assert end.exit_code == -signal.SIGKILL


def test_an_embedding_model_is_refused_before_a_report_is_made(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(home.root))
    refused = CliRunner().invoke(app, ["verify", "--mac", "demo-embedding"])
    assert "only chat models" in str(refused.exception)
    assert not home.mac_report_file.exists()


@pytest.mark.parametrize(
    "arguments", [["--kernels", "--mac"], ["--kernels", "--soak", "1s"], ["--measure", "1m"]]
)
def test_options_that_contradict_are_refused(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, ["verify", "demo", *arguments]).exception, Misuse)


@pytest.mark.parametrize(
    ("part", "beginning"),
    [
        (PartResult("soak"), "not ended"),
        (PartResult("verify", exit_code=1), "exit code 1"),
        (PartResult("kernels", exit_code=-9), "ended by signal 9"),
        (PartResult("measurements", exit_code=0, result=[{"left_out": "x"}]), "1 results, 1 left"),
    ],
)
def test_a_part_is_told_shortly(part: PartResult, beginning: str) -> None:
    assert summary(part).startswith(beginning)
