"""launchd: its property list, ends that it must not answer with a start, and its slow bootout."""

import json
import os
import plistlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxstack.control.service_units import LoginJob, launchd
from mlxstack.host.logs import rotate
from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S

LABEL = "mlx-stack.tiny"

ON_MAC = """\
from functools import partial
from mlxstack.cli.main import main
from mlxstack.control import service_units
service_units.unit_of = partial(service_units.unit_of, platform="darwin")
main()
"""

LAUNCHCTL = """\
#!/bin/sh
# Like launchd: after bootout a job drains for a while, is printed, and cannot be bootstrapped.
state={folder}/state
echo "$1 $2 $(cat $state 2>/dev/null)" >> {folder}/calls
left=$(cat $state 2>/dev/null || echo 0)
case $1 in
bootout)
    [ "$left" = 0 ] && {{ echo "Boot-out failed: 3: No such process" >&2; exit 3; }}
    echo {n_drain} > $state
    echo "Boot-out failed: 36: Operation now in progress" >&2; exit 36;;
print)
    [ "$left" = 0 ] && exit 113
    [ "$left" = up ] && exit 0
    echo $((left - 1)) > $state; exit 0;;
bootstrap)
    [ "$left" = 0 ] || {{ echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }}
    echo up > $state;;
esac
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.kill()


def launchctl(shell: Shell, n_drain: int) -> dict[str, str]:
    """The environment in which `launchctl` is imitated; a job drains for `n_drain` looks."""
    file = shell.folder / "bin" / "launchctl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(LAUNCHCTL.format(folder=shell.folder, n_drain=n_drain))
    file.chmod(0o755)
    return {"PATH": f"{file.parent}:/usr/bin:/bin", "HOME": str(shell.folder)}


def on_mac(shell: Shell, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", ON_MAC, *args],
        cwd=shell.folder,
        env=shell.env | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def verbs(shell: Shell) -> list[str]:
    return [line.split()[0] for line in (shell.folder / "calls").read_text().splitlines()]


def test_installing_again_waits_until_the_old_job_has_drained(shell: Shell) -> None:
    env = launchctl(shell, n_drain=3)
    first = on_mac(shell, "install", str(shell.preset), **env)
    assert first.returncode == 0, first.stderr
    assert verbs(shell) == ["bootstrap"]
    again = on_mac(shell, "install", str(shell.preset), **env)
    assert again.returncode == 0, again.stderr
    assert verbs(shell) == ["bootstrap", "bootout", *["print"] * 4, "bootstrap"]
    assert f"gui/{os.getuid()}/{LABEL}" in (shell.folder / "calls").read_text()
    plist = shell.folder / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert plist.exists()
    gone = on_mac(shell, "uninstall", "tiny", **env)
    assert gone.returncode == 0, gone.stderr
    assert "warning" not in gone.stderr
    assert not plist.exists()


def test_a_job_that_does_not_end_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxstack.cli.commands import install

    for name, value in launchctl(shell, n_drain=10**6).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(install, "KILL_S", -8.5)
    job = LoginJob("tiny", ("/bin/true",), str(shell.folder), {}, str(shell.folder / "log"), 4.0)
    unit = launchd(job, shell.folder, os.getuid())
    unit.path.parent.mkdir(parents=True)
    unit.path.write_text(unit.text)
    (shell.folder / "state").write_text("up")
    message = install._stop(unit)
    assert message is not None
    assert "Operation now in progress" in message


def test_the_property_list_has_what_a_service_needs(tmp_path: Path) -> None:
    job = LoginJob(
        "tiny", ("/bin/true",), str(tmp_path), {"PATH": "/bin"}, str(tmp_path / "log"), 9.0
    )
    unit = launchd(job, tmp_path, 501)
    read = plistlib.loads(unit.text.encode())
    assert read["SoftResourceLimits"] == {"NumberOfFiles": 8192}
    assert read["EnvironmentVariables"] == {"PATH": "/bin", "MLX_STACK_LAUNCHD": "1"}
    assert read["KeepAlive"] == {"SuccessfulExit": False}
    assert unit.probe == ("launchctl", "print", f"gui/501/{LABEL}")
    assert "log in" in unit.remark


@pytest.mark.parametrize(
    "args",
    [
        ("up", "wrong.yaml", "--foreground"),
        ("up", "no-such-preset", "--foreground"),
        ("up", "--no-such-option"),
    ],
    ids=lambda args: args[1],
)
def test_an_end_that_cannot_heal_is_a_success_under_launchd_only(
    shell: Shell, args: tuple[str, ...]
) -> None:
    (shell.folder / "wrong.yaml").write_text("extends: demo\nslots: {count: 0}\n")
    alone = shell.run(*args)
    assert alone.returncode in {2, 5}
    under = shell.run(*args, MLX_STACK_LAUNCHD="1")
    assert under.returncode == 0
    assert under.stderr == alone.stderr


def test_an_end_that_may_heal_is_still_a_failure_under_launchd(shell: Shell) -> None:
    assert shell.run("status", MLX_STACK_LAUNCHD="1").returncode == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limit of another process")
def test_a_worker_raises_its_limit_of_open_files(shell: Shell) -> None:
    command = ("bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash", *CLI, "up", str(shell.preset))
    done = subprocess.run(
        [*command, "--json"],
        cwd=shell.folder,
        env=shell.env | {"MLX_STACK_WORKER": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worker = psutil.Process(json.loads(done.stdout)["worker_pid"])
    soft, hard = worker.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 8192)


def test_a_log_that_others_append_to_is_moved_when_it_is_large(tmp_path: Path) -> None:
    path = tmp_path / "tiny.supervisor.log"
    rotate(path, 10)
    with path.open("ab") as writer:
        writer.write(b"0123456789")
        writer.flush()
        rotate(path, 10)
        assert not path.with_name(path.name + ".1").exists()
        writer.write(b"a")
        writer.flush()
        rotate(path, 10)
        writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.with_name(path.name + ".1").read_bytes() == b"0123456789a"
