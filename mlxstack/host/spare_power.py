"""Whether this computer can do work that nothing waits for."""

from typing import Any

import psutil

from mlxstack.host.memory_pressure import PressureLevel, pressure_level


def has_spare_power() -> bool:
    """Whether it has mains power and calm memory."""
    return not is_on_battery(psutil.sensors_battery()) and pressure_level() is PressureLevel.CALM


def is_on_battery(battery: Any) -> bool:
    """From psutil's battery status; None where there is no battery.

    A state of the plug that is unknown counts as mains, as in desktops with a UPS.
    """
    return battery is not None and battery.power_plugged is False
