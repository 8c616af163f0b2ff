"""A1, A3, A9, A10: the command as a person types it, a real worker behind a real supervisor."""

import errno
import json
import os
import re
import signal
import subprocess

import psutil
import pytest

from mlxstack.host.process import identify, is_alive
from mlxstack.store.files import WHY
from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.net


def kill_supervisor(shell: Shell) -> None:
    """Kill the supervisor of `tiny`, and wait until it is gone."""
    supervisor = identify(int((shell.home / "run" / "tiny.pid").read_text()))
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(supervisor))


def test_a1_up_status_logs_ps_down(shell: Shell) -> None:
    up = shell.up(MLX_STACK_PORT="1")
    assert up.returncode == 0, up.stderr
    assert "warning: MLX_STACK_PORT is set, but nothing reads it; did you mean" in up.stderr
    assert f"tiny is ready at http://127.0.0.1:{shell.port}" in up.stdout
    assert f"curl http://127.0.0.1:{shell.port}/v1/chat/completions" in up.stdout
    pid = int((shell.home / "run" / "tiny.pid").read_text())
    assert psutil.pid_exists(pid)

    status = shell.run("status")
    assert status.returncode == 0
    head = status.stdout.splitlines()[:4]
    assert head[0].startswith("Device: ")
    assert head[1].startswith("Memory: ") and "GiB" in head[1]
    assert head[2].startswith("Disk: ") and "written today" in head[2]
    assert head[3].startswith("Mode:")
    assert "3 x 1k" in status.stdout

    one = shell.services()["tiny"]
    assert one["state"] == "healthy"
    assert one["preset"] == str(shell.preset)
    assert one["url"] == f"http://127.0.0.1:{shell.port}"
    assert one["total_ctx"] == 3072
    assert one["supervisor_pid"] == pid
    assert psutil.pid_exists(one["worker_pid"])

    line = json.loads(shell.run("logs", "-n", "1", "--json").stdout)
    assert line == {"message": "listening"}
    first, *_ = shell.run("logs", "--json").stdout.splitlines()
    started = json.loads(first)
    assert started["source"] == "supervisor" and started["fields"] == {"pid": pid}
    assert started["message"] == f"worker {one['worker_pid']} started"
    ps = shell.run("ps")
    assert str(pid) in ps.stdout and "supervisor" in ps.stdout and "worker" in ps.stdout

    down = shell.run("down")
    assert (down.returncode, down.stdout) == (0, "tiny is stopped\n")
    assert not (shell.home / "run" / "tiny.pid").exists()
    assert shell.own_processes() == []
    assert shell.services()["tiny"]["state"] == "stopped"
    assert shell.run("status").returncode == 3


def test_a9_a_killed_supervisor_is_a_crash_and_up_works_again(shell: Shell) -> None:
    assert shell.up().returncode == 0
    kill_supervisor(shell)
    assert shell.services()["tiny"]["state"] == "crashed"
    up = shell.up()
    assert up.returncode == 0, up.stderr
    assert "cleared" in up.stderr
    assert shell.services()["tiny"]["state"] == "healthy"


def test_a9_a_killed_worker_comes_back(shell: Shell) -> None:
    assert shell.up().returncode == 0
    worker = shell.services()["tiny"]["worker_pid"]
    os.kill(worker, signal.SIGKILL)

    def is_back() -> bool:
        one = shell.services()["tiny"]
        return one["state"] == "healthy" and one["worker_pid"] != worker

    wait_until(is_back)
    one = shell.services()["tiny"]
    assert one["n_restarts"] == 1
    assert one["detail"] == "the last worker was killed by SIGKILL, as when memory runs out"


def test_a9_down_kills_the_deaf(shell: Shell) -> None:
    assert shell.up(WORKER_MODE="deaf").returncode == 0
    down = shell.run("down", "tiny", "--json")
    assert down.returncode == 0
    assert json.loads(down.stdout) == {"services": [{"name": "tiny", "end": "stopped"}]}
    assert not (shell.home / "run" / "tiny.pid").exists()
    assert shell.own_processes() == []


def test_a9_down_clears_a_crash_and_knows_when_nothing_runs(shell: Shell) -> None:
    assert shell.run("down").returncode == 0
    unknown = shell.run("down", "tiny")
    assert unknown.returncode == 3
    assert shell.up().returncode == 0
    kill_supervisor(shell)
    down = shell.run("down")
    assert down.returncode == 0
    assert "had crashed" in down.stdout
    again = shell.run("down", "tiny")
    assert (again.returncode, again.stderr) == (3, "error: `tiny` is not running\n")
    assert json.loads(shell.run("down", "--json").stdout) == {"services": []}
    assert shell.services()["tiny"]["state"] == "stopped"


def test_a9_down_stops_all_that_it_can(shell: Shell) -> None:
    for args in ((), ("--set", "name=other", "--port", "0")):
        assert shell.up(*args).returncode == 0
    assert shell.run("down", "other").returncode == 0
    both = shell.run("down", "other", "tiny", "tiny")
    assert (both.returncode, both.stdout) == (3, "tiny is stopped\n")
    assert both.stderr == "error: `other` is not running\n"
    assert shell.own_processes() == []


def test_restart_reads_the_preset_anew_and_keeps_the_options(shell: Shell) -> None:
    assert shell.up("--set", "slots.count=2").returncode == 0
    before = shell.services()["tiny"]
    shell.preset.write_text(shell.preset.read_text().replace("n_ctx: 1024", "n_ctx: 2048"))
    again = shell.run("restart")
    assert again.returncode == 0, again.stderr
    after = shell.services()["tiny"]
    assert (after["n_slots"], after["n_ctx"]) == (2, 2048)
    assert after["model"] == "demo" and after["memory_bytes"] > 10**6 and after["uptime_s"] > 0
    assert after["worker_pid"] != before["worker_pid"]
    assert after["supervisor_pid"] != before["supervisor_pid"]


def test_a_file_without_a_slash_is_found_from_any_folder(shell: Shell) -> None:
    assert shell.run("up", "tiny.yaml").returncode == 0
    assert shell.services()["tiny"]["preset"] == str(shell.preset)
    shell.folder = shell.home
    again = shell.run("restart")
    assert again.returncode == 0, again.stderr


def test_foreground_serves_until_it_is_asked_to_end(shell: Shell) -> None:
    process = subprocess.Popen(
        [*CLI, "up", str(shell.preset), "--foreground"],
        env=shell.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "listening" not in process.stdout.readline():
        assert process.poll() is None
    assert shell.services()["tiny"]["state"] == "healthy"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "drained, bye" in out
    assert shell.own_processes() == []


def test_status_while_loading_is_degraded(shell: Shell) -> None:
    process = subprocess.Popen(
        [*CLI, "up", str(shell.preset)], env=shell.env | {"WORKER_MODE": "slow"}
    )
    wait_until(lambda: shell.services().get("tiny", {}).get("state") == "degraded")
    one = shell.services()["tiny"]
    assert one["detail"] == "Loading model"
    assert shell.run("status").returncode == 1
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE_S)


def test_a10_status_of_one_of_two(shell: Shell) -> None:
    assert shell.up().returncode == 0
    assert shell.up("--set", "name=other", "--port", "0").returncode == 0
    one = json.loads(shell.run("status", "--name", "other", "--json").stdout)["services"]
    assert [seen["name"] for seen in one] == ["other"]
    assert shell.run("status", "--name", "nobody").returncode == 3
    both = shell.run("status", "--watch")
    assert (both.returncode, "name one of other, tiny" in both.stderr) == (2, True)
    assert shell.run("status", "--watch", "--name", "tiny", "--json").returncode == 2
    args = [*CLI, "status", "--watch", "--name", "tiny"]
    process = subprocess.Popen(args, env=shell.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.stdout.close()
    assert "several services run; name one of" in shell.run("logs").stderr
    assert shell.run("down").returncode == 0
    known = shell.run("logs")
    assert known.stderr == (
        "error: several services are known; name one of other, tiny: "
        "`mlx-stack logs --name other`\n"
    )
    for args in (("logs", "--name", "tiny"), ("logs", "tiny"), ("status", "tiny")):
        assert "Got unexpected" not in shell.run(*args).stderr, args
        assert "several" not in shell.run(*args).stderr, args


def test_a_log_in_the_foreground_that_nothing_reads_stops_its_service(shell: Shell) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*CLI, "up", str(shell.preset), "--foreground"],
        env=shell.env,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert shell.services()["tiny"]["state"] == "stopped"
    assert shell.own_processes() == []


def test_slots_list_and_erase(shell: Shell) -> None:
    assert shell.run("slots").returncode == 3
    assert shell.up().returncode == 0
    listed = shell.run("slots")
    assert listed.returncode == 0
    assert listed.stdout.count(" 1k ") == 3
    found = json.loads(shell.run("slots", "list", "--json").stdout)["slots"]
    assert json.loads(shell.run("slots", "--json").stdout)["slots"] == found
    assert [one["id"] for one in found] == [0, 1, 2]
    url = f"http://127.0.0.1:{shell.port}/v1/"
    assert json.loads(shell.run("slots", "--url", url, "--json").stdout)["slots"] == found
    erased = shell.run("slots", "erase", "0")
    assert erased.stdout == "slot 0: 7 tokens erased\n"
    lost = shell.run("slots", "save", "0", "x.bin")
    assert lost.returncode == 1 and "slot 0 is empty" in lost.stderr
    busy = shell.run("slots", "erase", "1")
    assert (busy.returncode, busy.stderr) == (1, "error: slot 1 is busy\n")


def test_logs_follow_prints_what_comes(shell: Shell) -> None:
    assert shell.up().returncode == 0
    process = subprocess.Popen(
        [*CLI, "logs", "-f", "-n", "1"], env=shell.env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    shell.run("down")
    lines = iter(process.stdout.readline, "")
    assert any(line == "drained, bye\n" for line in lines)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.stdout.close()


def test_c14_gc_asks_a_service_that_keeps_kv(shell: Shell) -> None:
    args = ("cache", "gc", "--max-bytes", "0", "--dry-run")
    embedding = ("--set", "name=embed", "--set", "kind=embedding", "--port", "0")
    assert shell.up(*embedding).returncode == 0
    alone = shell.run(*args)
    assert alone.returncode == 0, alone.stderr
    assert shell.up().returncode == 0
    assert shell.run(*args).stderr == "error: /cache/gc: not here\n"
    assert shell.run(*args, "--name", "embed").stderr == "error: only vectors here\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_remedy_for_a_full_disk_is_a_command_that_works(shell: Shell, code: int) -> None:
    command = re.search(r"`mlx-stack (cache gc.*)`", WHY[code])
    assert command is not None
    done = shell.run(*command[1].split())
    assert done.returncode == 0, done.stderr
