"""A2, A4, A7, A15: a start that cannot be says why in one sentence, and leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess

import pytest

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

pytestmark = pytest.mark.net


def test_a15_a_second_up_refuses_and_names_the_owner(shell: Shell) -> None:
    assert shell.up().returncode == 0
    pid = (shell.home / "run" / "tiny.pid").read_text().strip()
    again = shell.up("--port", str(unused_port()))
    assert again.returncode == 4
    for word in (f"pid {pid}", str(shell.preset), f"http://127.0.0.1:{shell.port}"):
        assert word in again.stderr
    assert "Traceback" not in again.stderr
    other = shell.up("--set", "slots.count=2")
    assert other.returncode == 0 and f"http://127.0.0.1:{shell.port}" in other.stdout
    assert "its settings differ; `mlx-stack down tiny`" in other.stderr
    shell.preset.write_text(shell.preset.read_text().replace("count: 3", "count: 2"))
    assert "its settings differ; `mlx-stack restart tiny`" in shell.up().stderr
    shell.preset.write_text(shell.preset.read_text().replace("count: 2", "count: 3"))
    assert "differ" not in shell.up().stderr
    needed = shell.up("--if-needed")
    assert needed.returncode == 0
    assert "already running" in needed.stdout
    told = json.loads(shell.up("--if-needed", "--json").stdout)
    assert (told["name"], told["supervisor_pid"]) == ("tiny", int(pid))
    assert shell.up("--if-needed", "--port", str(unused_port())).returncode == 4
    assert (shell.home / "run" / "tiny.pid").read_text().strip() == pid


def test_a15_a_taken_port_names_the_service_that_has_it(shell: Shell) -> None:
    assert shell.up().returncode == 0
    other = shell.up("--set", "name=other")
    assert other.returncode == 4
    assert f"port {shell.port} is taken by the service `tiny`" in other.stderr
    assert "mlx-stack down tiny" in other.stderr
    assert shell.up("--set", "name=other", "--port", "0").returncode == 0
    assert {one["state"] for one in shell.services().values()} == {"healthy"}
    assert shell.run("logs").returncode == 2
    down = shell.run("down")
    assert down.returncode == 0
    assert down.stdout.count("is stopped") == 2


def test_a15_a_foreign_port_names_its_process(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", shell.port)):
        up = shell.up()
    assert up.returncode == 4
    assert f"pid {os.getpid()}" in up.stderr


def test_a7_a_slow_start_ends_in_an_error_and_no_orphan(shell: Shell) -> None:
    up = shell.up("--set", "server.startup_timeout_s=1", WORKER_MODE="slow")
    assert up.returncode == 1
    assert "1 s of them (server.startup_timeout_s) after the last line of its log" in up.stderr
    assert "listening" in up.stderr and "--set server.startup_timeout_s=5" in up.stderr
    assert shell.own_processes() == []
    assert not (shell.home / "run" / "tiny.pid").exists()


def test_a7_a_load_with_progress_takes_as_long_as_it_takes(shell: Shell) -> None:
    up = shell.up("--set", "server.startup_timeout_s=5", WORKER_MODE="loads")
    assert up.returncode == 0, up.stderr
    assert re.search(r"starting tiny \(\d+s\): reading the weights: \d GiB of 8", up.stderr)
    assert shell.run("down").returncode == 0
    modes = shell.home / "presets" / "modes"
    modes.mkdir(parents=True, mode=0o700)
    text = "{preset: tiny, set: {server.startup_timeout_s: 5}}"
    (modes / "alone.yaml").write_text(f"members: [{text}]\n")
    shell.preset.rename(shell.home / "presets" / "tiny.yaml")
    switched = shell.run("mode", "switch", "alone", WORKER_MODE="loads")
    assert switched.returncode == 0, switched.stderr


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("dies", "the weights are not there"), ("hopeless", "this model cannot be served")],
)
def test_a7_a_failed_start_says_why_and_leaves_nothing(
    shell: Shell, mode: str, reason: str
) -> None:
    up = shell.up(WORKER_MODE=mode)
    assert up.returncode == 1
    assert up.stderr == f"error: `tiny` did not start: {reason}\n"
    assert shell.own_processes() == []
    assert not (shell.home / "run" / "tiny.pid").exists()


def test_a7_interrupting_a_start_leaves_nothing(shell: Shell) -> None:
    process = subprocess.Popen(
        [*CLI, "up", str(shell.preset)], env=shell.env | {"WORKER_MODE": "slow"}
    )
    log = shell.home / "logs" / "tiny.log"
    wait_until(lambda: log.exists() and "listening" in log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert shell.own_processes() == []


def test_a2_dry_run_shows_everything_and_makes_nothing(shell: Shell) -> None:
    shown = shell.up("--dry-run", "--set", "slots.count=7", MLX_STACK_BATCH_MAX_SIZE="4")
    assert shown.returncode == 0
    assert "count: 7" in shown.stdout
    assert "max_size: 4" in shown.stdout
    assert "# batch.max_size: MLX_STACK_BATCH_MAX_SIZE" in shown.stdout
    assert not shell.home.exists()
    told = json.loads(shell.up("--dry-run", "--json").stdout)
    assert told["preset"]["slots"]["n_ctx"] == 1024
    assert told["origins"]["slots.n_ctx"] == f"{shell.preset}:2"


def test_a2_a_wrong_preset_is_one_sentence_with_its_line(shell: Shell) -> None:
    shell.preset.write_text("extends: demo\nslots:\n  coutn: 3\n")
    up = shell.up()
    assert up.returncode == 5
    assert up.stderr == (
        f"error: {shell.preset}:3: unknown key `slots.coutn`; did you mean `count`?\n"
    )


def test_a4_a_slot_folder_is_checked_before_the_model(shell: Shell) -> None:
    up = shell.up("--set", "slots.save_path=/dev/null/slots")
    assert up.returncode == 5
    assert "/dev/null/slots" in up.stderr
    assert not (shell.home / "logs" / "tiny.log").exists()
    kept = shell.folder / "kept" / "slots"
    assert shell.up("--set", f"slots.save_path={kept}").returncode == 0
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_missing_model_folder_is_refused_before_start(shell: Shell) -> None:
    up = shell.up("--set", "model.id=./nowhere")
    assert up.returncode == 5
    assert f"there is no folder {shell.folder / 'nowhere'}" in up.stderr
    assert not (shell.home / "logs" / "tiny.log").exists()
