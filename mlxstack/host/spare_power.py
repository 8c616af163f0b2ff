"""Spare power: mains, calm memory and cool hardware for background work."""

import re
from typing import Any

import psutil

from mlxstack.host.macos import program_output
from mlxstack.host.memory_pressure import PressureLevel, pressure_level

THERMAL = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
"""Thermal level: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping.

`pmset -g therm` tells none of them on Apple silicon.
"""

THERMAL_LEVEL = re.compile(r"com\.apple\.system\.thermalpressurelevel (\d+)")
WAIT_S = 2.0


def has_spare_power() -> bool:
    """Whether on mains, with calm memory, and cool if known."""
    return has_calm_mains() and not is_warm(thermal_level())


def has_calm_mains() -> bool:
    """Whether on mains with calm memory. Starts no process."""
    is_powered = not is_on_battery(psutil.sensors_battery())
    return is_powered and pressure_level() is PressureLevel.CALM


def is_on_battery(battery: Any) -> bool:
    """Whether on battery, by psutil's status, None without one.

    A state of the plug that is unknown counts as mains, as in desktops with a UPS.
    """
    return battery is not None and battery.power_plugged is False


def is_warm(level: int | None) -> bool:
    """Whether the system throttles for heat; unknown counts as cool."""
    return bool(level)


def thermal_level() -> int | None:
    """Thermal pressure level of macOS; None where unknown."""
    match = THERMAL_LEVEL.match(program_output(THERMAL, WAIT_S).decode(errors="replace"))
    if match:
        return int(match[1])
    return None
