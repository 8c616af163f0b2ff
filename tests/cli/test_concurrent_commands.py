"""A7, A15: commands that meet: starts at once, a stop during a start, a start during a stop."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

pytestmark = pytest.mark.net

Begun = "subprocess.Popen[str]"


def begin(shell: Shell, *args: str, **env: str) -> Begun:
    return subprocess.Popen(
        [*CLI, *args],
        cwd=shell.folder,
        env=shell.env | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(question: Callable[[], object]) -> None:
    wait_until(question)


def is_loading(shell: Shell) -> bool:
    one = shell.services().get("tiny", {})
    return one.get("state") == "degraded" and one["worker_pid"] is not None


def test_a15_of_two_ups_at_once_one_wins_and_serves_what_it_was_told(shell: Shell) -> None:
    ports = [unused_port(), unused_port()]
    both = [begin(shell, "up", str(shell.preset), "--port", str(port)) for port in ports]
    told = [one.communicate(timeout=PATIENCE_S) for one in both]
    codes = [one.returncode for one in both]
    assert sorted(codes) == [0, 4], told
    assert "`tiny` is" in told[codes.index(4)][1]
    one = shell.services()["tiny"]
    assert one["state"] == "healthy"
    assert one["url"] == f"http://127.0.0.1:{ports[codes.index(0)]}"


def test_a15_all_who_need_it_at_once_get_it(shell: Shell) -> None:
    three = [begin(shell, "up", str(shell.preset), "--if-needed") for _ in range(3)]
    told = [one.communicate(timeout=PATIENCE_S) for one in three]
    assert [one.returncode for one in three] == [0, 0, 0], told
    assert sorted("already running" in out for out, _ in told) == [False, True, True]
    assert shell.services()["tiny"]["state"] == "healthy"


def test_a9_two_restarts_at_once_both_restart(shell: Shell) -> None:
    assert shell.up().returncode == 0
    both = [begin(shell, "restart") for _ in range(2)]
    told = [one.communicate(timeout=PATIENCE_S) for one in both]
    assert [one.returncode for one in both] == [0, 0], told
    assert shell.services()["tiny"]["state"] == "healthy"


def test_a15_who_needs_what_just_stops_gets_a_new_one(shell: Shell) -> None:
    assert shell.up("--set", "server.drain_s=2", WORKER_MODE="deaf").returncode == 0
    former = shell.services()["tiny"]["worker_pid"]
    down = begin(shell, "down")
    until(lambda: '"stopping"' in (shell.home / "run" / "tiny.json").read_text())
    up = shell.up("--if-needed")
    assert up.returncode == 0, up.stderr
    assert "waiting until tiny has stopped" in up.stderr
    assert down.communicate(timeout=PATIENCE_S)[0] == "tiny is stopped\n"
    one = shell.services()["tiny"]
    assert one["state"] == "healthy" and one["worker_pid"] != former


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a7_an_up_that_is_ended_leaves_nothing(shell: Shell, how: signal.Signals) -> None:
    up = begin(shell, "up", str(shell.preset), WORKER_MODE="slow")
    until(lambda: is_loading(shell))
    up.send_signal(how)
    _, told = up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 128 + how
    assert how is signal.SIGTERM or "interrupted; tiny is stopped" in told
    assert shell.own_processes() == []
    assert shell.services()["tiny"]["state"] == "stopped"


def test_a7_a_down_ends_a_start_which_says_so(shell: Shell) -> None:
    up = begin(shell, "up", str(shell.preset), WORKER_MODE="slow")
    until(lambda: is_loading(shell))
    assert shell.run("down").stdout == "tiny is stopped\n"
    _, told = up.communicate(timeout=PATIENCE_S)
    assert (up.returncode, told) == (1, "error: `tiny` was stopped while it was starting\n")
    assert shell.own_processes() == []


def test_a7_how_a_worker_died_while_it_started_is_told(shell: Shell) -> None:
    up = begin(shell, "up", str(shell.preset), WORKER_MODE="slow")
    until(lambda: is_loading(shell))
    os.kill(shell.services()["tiny"]["worker_pid"], signal.SIGKILL)
    _, told = up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 1
    assert told.startswith("error: `tiny` did not start: its worker was killed by SIGKILL, ")
    assert shell.own_processes() == []


def test_a_service_whose_run_folder_was_deleted_is_found_again(shell: Shell) -> None:
    up = shell.up()
    assert up.returncode == 0, up.stderr
    before = shell.services()["tiny"]
    shutil.rmtree(shell.home / "run")
    wait_until(lambda: shell.services() != {}, "the service is not found again")
    assert shell.services()["tiny"]["supervisor_pid"] == before["supervisor_pid"]
    # The preset that a new worker reads is there again, too.
    os.kill(before["worker_pid"], signal.SIGKILL)
    wait_until(
        lambda: shell.services()["tiny"]["worker_pid"] not in {None, before["worker_pid"]},
        "no worker was started again",
    )
    wait_until(lambda: shell.services()["tiny"]["state"] == "healthy", "it is not healthy")
    down = shell.run("down")
    assert (down.returncode, down.stdout) == (0, "tiny is stopped\n")
    assert not shell.own_processes()
