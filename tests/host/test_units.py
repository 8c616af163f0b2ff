"""Units for launchd and systemd: rendered, and read again by the systems' own readers."""

import plistlib
from pathlib import Path

import pytest

from mlxstack.control.service_units import LoginJob, launchd, systemd, unit_of
from mlxstack.core.errors import SetupError
from tests.systemd import verify

AWKWARD = 'a "quoted" $HOME 100% back\\slash'


def job(folder: Path, **env: str) -> LoginJob:
    return LoginJob(
        name="demo",
        command=("/bin/echo", "-m", "mlxstack.cli.main", "up", AWKWARD, "--foreground"),
        cwd=str(folder),
        env=env,
        log=str(folder / "demo.log"),
        stop_s=9.0,
    )


def test_a_launchd_agent_is_a_property_list(tmp_path: Path) -> None:
    unit = launchd(job(tmp_path, WORDS=AWKWARD), tmp_path, 501)
    assert unit.path == tmp_path / "Library" / "LaunchAgents" / "mlx-stack.demo.plist"
    read = plistlib.loads(unit.text.encode())
    assert read["ProgramArguments"][-2:] == [AWKWARD, "--foreground"]
    assert read["EnvironmentVariables"] == {"WORDS": AWKWARD, "MLX_STACK_LAUNCHD": "1"}
    assert read["KeepAlive"] == {"SuccessfulExit": False}
    assert read["ExitTimeOut"] == 14
    assert read["ProcessType"] == "Interactive"
    assert unit.start == (("launchctl", "bootstrap", "gui/501", str(unit.path)),)
    assert unit.stop == (("launchctl", "bootout", "gui/501/mlx-stack.demo"),)


def test_a_systemd_unit_escapes_what_systemd_would_expand(tmp_path: Path) -> None:
    text = systemd(job(tmp_path, WORDS=AWKWARD), tmp_path).text
    assert r'"a \"quoted\" $$HOME 100%% back\\slash"' in text
    assert r'Environment="WORDS=a \"quoted\" $HOME 100%% back\\slash"' in text


def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    unit = systemd(job(tmp_path, WORDS=AWKWARD), tmp_path)
    unit.path.parent.mkdir(parents=True)
    unit.path.write_text(unit.text)
    verify(unit.path)


def test_a_systemd_unit_writes_to_the_journal(tmp_path: Path) -> None:
    unit = systemd(job(tmp_path), tmp_path)
    lines = unit.text.splitlines()
    assert {"StandardOutput=journal", "StandardError=journal"} <= set(lines)
    assert "journalctl --user -u mlx-stack-demo.service" in unit.remark


def test_each_system_gets_its_own_kind(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert unit_of(job(tmp_path), env, "darwin").path.suffix == ".plist"
    linux = unit_of(job(tmp_path), env, "linux")
    assert linux.path == tmp_path / "config" / "systemd" / "user" / "mlx-stack-demo.service"
    with pytest.raises(SetupError, match="not on win32"):
        unit_of(job(tmp_path), env, "win32")


def test_a_line_break_cannot_smuggle_a_setting_in(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="line break"):
        systemd(job(tmp_path, EVIL="x\nExecStartPre=/bin/false"), tmp_path)
