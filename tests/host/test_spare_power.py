"""Whether the computer has power to spare."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlxstack.host import spare_power
from mlxstack.host.memory_pressure import PressureLevel
from mlxstack.host.spare_power import has_spare_power, is_on_battery, is_warm, thermal_level

SAID = "com.apple.system.thermalpressurelevel"


@pytest.mark.parametrize(
    ("battery", "is_on"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
    ids=["no battery", "mains", "an unknown plug", "battery"],
)
def test_power_is_spare_on_mains_only(battery: SimpleNamespace | None, is_on: bool) -> None:
    assert is_on_battery(battery) == is_on


def test_this_computer_is_asked() -> None:
    assert isinstance(has_spare_power(), bool)
    assert thermal_level() in {None, 0, 1, 2, 3, 4}


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Mac on mains with calm memory."""
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    monkeypatch.setattr(spare_power, "pressure_level", lambda: PressureLevel.CALM)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (f"echo {SAID} 0", 0),
        (f"echo {SAID} 1", 1),
        (f"echo {SAID} 2", 2),
        (f"echo {SAID} failed; exit 1", None),
        ("exit 64", None),
        ("exec sleep 60", None),
    ],
    ids=["nominal", "moderate", "heavy", "a failed registration", "no such option", "no answer"],
)
def test_a_warm_mac_has_none(
    calm: pytest.MonkeyPatch, tmp_path: Path, text: str, level: int | None
) -> None:
    """`notifyutil -g` prints the key and its state."""
    program = tmp_path / "notifyutil"
    program.write_text(f'#!/bin/sh\n[ "$*" = "-g {SAID}" ] || exit 3\n{text}\n')
    program.chmod(0o755)
    calm.setattr(spare_power, "THERMAL", (str(program), "-g", SAID))
    calm.setattr(spare_power, "WAIT_S", 0.2)
    assert thermal_level() == level
    assert is_warm(level) == (level in {1, 2})
    assert has_spare_power() == (not level)


def test_a_mac_without_the_program_is_cool(calm: pytest.MonkeyPatch) -> None:
    calm.setattr(spare_power, "THERMAL", ("/nowhere/notifyutil",))
    assert thermal_level() is None
    assert has_spare_power()
