"""Power, heat and memory pressure of this computer, as reports name them."""

import re
import sys
from enum import StrEnum

import psutil
from msgspec import Struct

from mlxstack.host.macos import program_output
from mlxstack.host.memory_pressure import pressure_level
from mlxstack.host.spare_power import is_on_battery, thermal_level

POWER_SETTINGS = ("/usr/bin/pmset", "-g")
LOW_POWER = re.compile(r"^\s*(?:low)?powermode\s+(\d+)", re.MULTILINE)
"""Setting of the power mode: 1 is low, where there are three of them too."""

THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


class PowerSource(StrEnum):
    """Source of power; a desktop is on mains."""

    MAINS = "mains"
    BATTERY = "battery"


class PowerState(Struct, frozen=True):
    """Power, heat and memory pressure at an instant; None is unknown.

    `thermal_level` is 0 (nominal) to 4 (sleeping), `pressure` "calm", "high" or "critical".
    """

    source: PowerSource
    pressure: str
    is_low_power: bool | None = None
    thermal_level: int | None = None

    def __str__(self) -> str:
        parts = ["on battery" if self.source is PowerSource.BATTERY else "on mains"]
        if self.is_low_power is not None:
            parts.append(f"low power mode {'on' if self.is_low_power else 'off'}")
        if self.thermal_level is not None:
            level = THERMAL_LEVELS[min(self.thermal_level, len(THERMAL_LEVELS) - 1)]
            parts.append(f"thermal level {self.thermal_level} ({level})")
        return ", ".join([*parts, f"memory pressure {self.pressure}"])


def power_state() -> PowerState:
    """State of this computer now."""
    is_mac = sys.platform == "darwin"
    is_powered = not is_on_battery(psutil.sensors_battery())
    return PowerState(
        source=PowerSource.MAINS if is_powered else PowerSource.BATTERY,
        pressure=pressure_level().name.lower(),
        is_low_power=_is_low_power() if is_mac else None,
        thermal_level=thermal_level() if is_mac else None,
    )


def _is_low_power() -> bool | None:
    match = LOW_POWER.search(program_output(POWER_SETTINGS).decode(errors="replace"))
    if match:
        return match[1] == "1"
    return None
