"""`doctor --hosts`: two names of this machine, and an SSH that runs commands here, or fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxstack.cli.doctor import CheckLevel, CheckResult
from mlxstack.core.preset import ModelSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.features.ranks.doctor import compare_files, examine_hosts, sums_s
from mlxstack.features.ranks.probe import FilesDigest, LinkSpeed, digest_files
from tests.cli import terminal

pytestmark = pytest.mark.net
PAGE = Path(__file__).parents[2] / "docs" / "two-macs.md"
HERE = "127.0.0.1"
OTHER = "127.1"
"""A name of this machine that does not look like one: it is reached by SSH."""
LINK = re.compile(rf"{OTHER}: \d+\.\d\d GB/s, \d+ us a round trip to {HERE}")
RUNS = 'for command; do :; done\nexec sh -c "$command"'
"""Runs the last word, as the shell of another machine does."""


class Ssh:
    """A program `ssh` that is found first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "ssh"
        self.said = folder / "said"
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def does(self, script: str) -> None:
        self.file.write_text(f'#!/bin/sh\necho "$@" >>{self.said}\n{script}\n')
        self.file.chmod(0o755)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    (tmp_path / "bin").mkdir()
    return Ssh(tmp_path / "bin", monkeypatch)


def run(home: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    return terminal.run(args, {**os.environ, "MLX_STACK_HOME": str(home), "COLUMNS": "200"})


def checks(*hosts: str, **more: Any) -> dict[str, CheckResult]:
    """Results by what they are about; each of these is one."""
    found = list(examine_hosts(hosts or (HERE, OTHER), **more))
    assert all(one.remedy for one in found if one.verdict is not CheckLevel.OK)
    assert len({one.subject for one in found}) == len(found), found
    return {one.subject: one for one in found}


def test_two_names_of_this_machine(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "demo", "--hosts", f"{HERE},localhost", "--json")
    found = {one["subject"]: one for one in json.loads(done.stdout)["findings"]}
    told = [found[name] for name in ("reach", "versions", "clock", "link", "model files", "step")]
    assert {one["verdict"] for one in told} == {"ok"}, told
    assert found["reach"]["detail"] == "localhost: a process started on this machine"
    assert found["model files"]["detail"] == "localhost: demo, as here"
    assert re.fullmatch(
        r"a decode step pays \d+\.\d ms for \d+ sums of .*", found["step"]["detail"]
    )
    assert found["home"]["verdict"] == "ok"
    assert done.returncode == 0


def test_hosts_are_those_of_the_preset_and_a_failure_is_the_exit_code(tmp_path: Path) -> None:
    preset = tmp_path / "two.yaml"
    preset.write_text("extends: demo\nhosts: [192.0.2.1, 192.0.2.2]\n")
    failed = run(tmp_path, "doctor", str(preset), "--json")
    assert failed.returncode == 1
    *_, last = json.loads(failed.stdout)["findings"]
    assert (last["subject"], last["verdict"]) == ("hosts", "bad")
    assert last["detail"].startswith("192.0.2.1 is no address of this machine: ")
    for args, why in (
        (("--hosts", "a"), "this one first"),
        (("--hosts", "a,-oProxyCommand=x"), "names or IPv4 addresses"),
        (("demo",), "names no `hosts`"),
    ):
        refused = run(tmp_path, "doctor", *args)
        assert refused.returncode == 2 and why in refused.stderr


def test_a_machine_that_is_as_this_one_is_reached_by_ssh(ssh: Ssh) -> None:
    ssh.does(f"echo welcome; {RUNS}")
    found = checks()
    assert {one.verdict for one in found.values()} == {CheckLevel.OK}
    assert found["reach"].detail == f"{OTHER}: a process started by SSH, without a prompt"
    assert LINK.fullmatch(found["link"].detail)
    assert ssh.said.read_text().startswith(f"-T -o BatchMode=yes {OTHER} {sys.executable} -P -m ")


def test_what_differs_there_is_told(ssh: Ssh, tmp_path: Path) -> None:
    (tmp_path / "mlx-0.0.1.dist-info").mkdir()
    (tmp_path / "mlx-0.0.1.dist-info" / "METADATA").write_text("Name: mlx\nVersion: 0.0.1\n")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('no libmlx.so')")
    clock = "import time\nnow = time.time\ntime.time = lambda: now() - 60\n"
    (tmp_path / "sitecustomize.py").write_text(clock)
    ssh.does(f"export PYTHONPATH={tmp_path}\n{RUNS}")
    found = checks(model=ModelSpec(id="demo"))
    assert found["versions"].verdict is CheckLevel.BAD
    assert found["versions"].detail.startswith(f"{OTHER}: mlx 0.0.1, here ")
    assert found["clock"].verdict is CheckLevel.WARN
    assert re.fullmatch(rf"{OTHER}: (59|60|61)\.\d\d s behind", found["clock"].detail)
    assert found["link"].verdict is CheckLevel.OK
    assert found["model files"].verdict is CheckLevel.BAD
    why = "MLX does not start: ImportError: no libmlx.so"
    assert found["model files"].detail == f"{OTHER}: {why}"


def test_other_files_and_other_code_are_told(tmp_path: Path) -> None:
    model = ModelSpec(id="x")
    digests = []
    for name, config, code in (("a", {}, ""), ("b", {"rope_theta": 1.0}, ""), ("c", {}, "# more")):
        folder = shutil.copytree(MODEL_DIR, tmp_path / name)
        facts = json.loads((MODEL_DIR / "config.json").read_text()) | {"model_file": "m.py"}
        (folder / "config.json").write_text(json.dumps(facts | config))
        (folder / "m.py").write_text(code)
        digests.append(digest_files(ModelSpec(id=str(folder))))
    told = [compare_files("b", model, digests[0], one) for one in digests]
    assert [one.verdict for one in told] == [CheckLevel.OK, CheckLevel.BAD, CheckLevel.BAD]
    assert told[1].detail == "b: other model files of x than here"
    assert told[2].detail == "b: other model code of x than here"


def test_files_that_are_not_there_are_told_and_not_downloaded(tmp_path: Path) -> None:
    missing = digest_files(ModelSpec(id=str(tmp_path)))
    assert missing == FilesDigest(
        problem=f"the folder {tmp_path} holds no config.json, so it is no model"
    )
    hub = digest_files(ModelSpec(id="no-one/has-this"))
    assert hub == FilesDigest(problem="no-one/has-this is not downloaded")


@pytest.mark.parametrize(
    ("script", "patience_s", "why", "remedy"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", 60,
         "SSH failed: Permission denied", f"`ssh -o BatchMode=yes {OTHER} true`"),
        ("exec sleep 600", 0.5,
         "no process has connected within 0.5 s", f"`ssh -o BatchMode=yes {OTHER} true`"),
        ("echo 'No module named mlxstack' >&2; exit 1", 60,
         "a rank does not start there: No module named mlxstack", "install mlx-stack there"),
        (RUNS.replace("exec", "echo another-key | exec"), 60,
         "a rank does not start there: exit code 0", "install mlx-stack there"),
    ],
    ids=["refuses", "hangs", "has-none", "has-another-key"],
)  # fmt: skip
def test_a_machine_that_is_not_reached(
    ssh: Ssh, script: str, patience_s: float, why: str, remedy: str
) -> None:
    ssh.does(script)
    (one,) = checks(patience_s=patience_s).values()
    assert (one.verdict, one.subject) == (CheckLevel.BAD, "reach")
    assert one.detail.startswith(f"{OTHER}: {why}")
    assert remedy in one.remedy


def test_a_machine_that_cannot_reach_this_one_or_has_another_address(ssh: Ssh) -> None:
    elsewhere = f'command=$(echo "$command" | sed s/{HERE}:[0-9]*/{HERE}:1/)'
    ssh.does(RUNS.replace("exec", f"{elsewhere}\nexec"))
    (one,) = checks().values()
    assert one.detail.startswith(f"{OTHER}: {HERE}:1 cannot be reached from there: ")
    assert "firewall" in one.remedy

    ssh.does(RUNS)
    found = checks(HERE, "192.0.2.1")
    assert found["reach"].verdict is CheckLevel.OK
    assert found["link"].verdict is CheckLevel.BAD
    assert found["link"].detail.startswith("192.0.2.1: it cannot listen on 192.0.2.1: ")

    (one,) = checks(HERE, "no-such-machine.invalid").values()
    assert one.verdict is CheckLevel.BAD and "no-such-machine.invalid" in one.detail


def test_no_program_ssh_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (one,) = checks().values()
    assert one.detail == f"{OTHER}: there is no program `ssh` here"


def test_the_cost_of_a_step_is_that_of_the_page() -> None:
    rows = re.findall(
        r"\| (\d+) x (\d+) \|.*\| (\d+) \| ([\d.]+) ms \| ([\d.]+) ms \|", PAGE.read_text()
    )
    assert len(rows) == 3
    for n_layers, hidden, n_sums, slow, fast in rows:
        assert int(n_sums) == 2 * int(n_layers)
        for link, cost in ((LinkSpeed(1.1e9, 50e-6), slow), (LinkSpeed(3e9, 30e-6), fast)):
            assert sums_s(int(n_layers), int(hidden), 2, link) * 1e3 == pytest.approx(
                float(cost), abs=0.06
            )
