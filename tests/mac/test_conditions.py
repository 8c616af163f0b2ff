"""Conditions that reports name on a Mac; its programs are imitated."""

import os
import plistlib
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from mlxstack.bench import environment
from mlxstack.bench.environment import Conditions, conditions, details, ended
from mlxstack.cli import doctor
from mlxstack.cli.doctor import CheckLevel, power
from mlxstack.engine.device_facts import device_facts
from mlxstack.host import macos, power_state, spare_power
from mlxstack.host.hardware import ask_mlx
from mlxstack.host.home import Home
from mlxstack.host.macos import SystemVersion, gpu_cores, macos_version, system_version
from mlxstack.host.power_state import PowerSource, PowerState
from tests.patience import PATIENCE_S

DAY = date(2026, 11, 28)
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 sleep                1 (sleep prevented by caffeinate)
 {mode}
 womp                 1
"""
Program = Callable[[str, str], tuple[str, ...]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Make a program with this name and shell text; its command."""

    def make(name: str, text: str) -> tuple[str, ...]:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return (str(file),)

    return make


@pytest.fixture
def mac(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """A Mac with macOS 26.2 on battery, in low power mode, warm, whose Python has an old SDK."""
    real = tmp_path / "real.plist"
    compatible = tmp_path / "compatible.plist"
    real.write_bytes(plistlib.dumps({"ProductVersion": "26.2", "ProductBuildVersion": "25C56"}))
    compatible.write_bytes(plistlib.dumps({"ProductVersion": "16.2"}))
    cores = tmp_path / "cores.plist"
    cores.write_bytes(plistlib.dumps([{"IOClass": "AGXAcceleratorG15X", "gpu-core-count": 40}]))
    cat = f"[ $SYSTEM_VERSION_COMPAT = 0 ] && exec cat {real}\nexec cat {compatible}"
    settings = SETTINGS.format(mode="lowpowermode         1")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(macos, "SYSTEM_VERSION", program("cat", f"PATH=/bin:/usr/bin\n{cat}"))
    monkeypatch.setattr(macos, "GPU_REGISTRY", program("ioreg", f"exec cat {cores}"))
    monkeypatch.setattr(power_state, "POWER_SETTINGS", program("pmset", f"echo '{settings}'"))
    warm = "echo com.apple.system.thermalpressurelevel 1"
    monkeypatch.setattr(spare_power, "THERMAL", program("notifyutil", warm))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False))
    monkeypatch.setattr(environment, "sysctl", {b"iogpu.wired_limit_mb": 0}.get)
    gpu = {"kind": "gpu", "name": "Apple M3 Max", "architecture": "applegpu_g15s"}
    monkeypatch.setattr(environment, "ask_mlx", lambda *_, **__: gpu)
    system_version.cache_clear()
    yield monkeypatch
    system_version.cache_clear()


def test_the_version_of_macos_is_read_without_compatibility(mac: pytest.MonkeyPatch) -> None:
    assert system_version() == SystemVersion((26, 2), "25C56")
    assert macos_version() == (26, 2)
    assert str(system_version()) == "macOS 26.2 (25C56)"


@pytest.mark.mlx
def test_device_facts_need_no_engine() -> None:
    facts = ask_mlx(["-P", str(environment.DEVICE_PROGRAM)], dict[str, object], PATIENCE_S)
    assert facts == device_facts()


@pytest.mark.parametrize("text", ["exit 1", "echo no property list", "echo '<plist'"])
def test_a_version_that_cannot_be_read_is_unknown(
    mac: pytest.MonkeyPatch, program: Program, text: str
) -> None:
    mac.setattr(macos, "SYSTEM_VERSION", program("cat", text))
    mac.setattr(macos, "GPU_REGISTRY", program("ioreg", text))
    assert system_version() == SystemVersion()
    assert gpu_cores() is None


def test_a_report_names_system_gpu_variables_power_and_heat(mac: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "MLX_MAX_OPS_PER_BUFFER": "7", "MLX_STACK_HOME": "/private"}
    begun = conditions("demo", DAY, env)
    mac.setattr(power_state, "thermal_level", lambda: 2)
    mac.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=True))
    conditions_read = msgspec.json.decode(msgspec.json.encode(ended(begun)), type=Conditions)
    assert conditions_read.macos == "macOS 26.2 (25C56)"
    assert conditions_read.gpu == "Apple M3 Max, applegpu_g15s, 40 cores"
    assert conditions_read.wired_limit_mb == 0
    assert conditions_read.mlx_variables["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert not any("STACK" in name for name in conditions_read.mlx_variables)
    assert conditions_read.before is not None and conditions_read.after is not None
    before = conditions_read.before
    after = conditions_read.after
    assert (before.source, before.is_low_power, before.thermal_level) == ("battery", True, 1)
    assert (after.source, after.thermal_level) == ("mains", 2)
    text = "\n".join(details(conditions_read))
    for part in (
        "macOS 26.2 (25C56); Apple M3 Max, applegpu_g15s, 40 cores; iogpu.wired_limit_mb not set",
        "MLX_MAX_OPS_PER_BUFFER=7",
        "Before: on battery, low power mode on, thermal level 1 (moderate), memory pressure ",
        "After: on mains, low power mode on, thermal level 2 (heavy), memory pressure ",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("mode", "is_low"),
    [
        ("lowpowermode         0", False),
        ("powermode            1", True),
        ("powermode            2", False),
        ("displaysleep         10", None),
    ],
    ids=["off", "low of three modes", "high of three modes", "a Mac without it"],
)
def test_low_power_mode_is_read_from_the_settings(
    mac: pytest.MonkeyPatch, program: Program, mode: str, is_low: bool | None
) -> None:
    command = program("pmset", f"echo '{SETTINGS.format(mode=mode)}'")
    mac.setattr(power_state, "POWER_SETTINGS", command)
    assert power_state.power_state().is_low_power is is_low


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        (PowerState(PowerSource.MAINS, "calm", False, 0), ""),
        (PowerState(PowerSource.BATTERY, "calm"), "plug in"),
        (PowerState(PowerSource.MAINS, "calm", True, 0), "low power mode off"),
        (PowerState(PowerSource.MAINS, "calm", False, 2), "cool down"),
        (PowerState(PowerSource.MAINS, "high", False, 0), "take memory"),
    ],
    ids=["fast", "battery", "low power mode", "heat", "memory pressure"],
)
def test_doctor_names_slow_power(state: PowerState, remedy: str) -> None:
    (check,) = power(state)
    assert check.verdict is (CheckLevel.WARN if remedy else CheckLevel.OK)
    assert check.detail == str(state)
    assert remedy in check.remedy


def test_doctor_names_the_gpu_with_its_cores(mac: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = {"kind": "gpu", "name": "Apple M3 Max", "architecture": "applegpu_g15s", "limit_bytes": 0}
    mac.setattr(doctor, "ask_mlx", lambda *_, **__: gpu)
    (check,) = doctor.device({}, Home(tmp_path))
    assert check.verdict is CheckLevel.OK
    assert check.detail == "MLX computes on the gpu, Apple M3 Max, applegpu_g15s, 40 cores"


def test_a_report_of_another_system_says_what_it_has() -> None:
    report = ended(conditions("demo", DAY, os.environ))
    assert not report.macos and report.wired_limit_mb is None
    assert report.before is not None and report.before.is_low_power is None
    assert any(line.startswith("After: on ") for line in details(report))
