"""How short of memory this computer is, as its kernel sees it.

macOS: kern.memorystatus_vm_pressure_level (1 normal, 2 warning, 4 critical). Linux: pressure
stall information, the share of the last ten seconds in which somebody waited for memory.
Elsewhere, and beside them, the share of memory in use.
"""

import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import psutil

FULL = 0.85
CROWDED = 0.95
PSI = Path("/proc/pressure/memory")
STALLING = 10.0
CHOKING = 40.0
MAC_LEVELS = {2: 1, 4: 2}


class Level(IntEnum):
    """CALM, HIGH: cold things should go, CRITICAL: everything that may."""

    CALM = 0
    HIGH = 1
    CRITICAL = 2


def level() -> Level:
    """The worst of what this computer's signs say."""
    kernel = of_mac(_mac()) if sys.platform == "darwin" else of_psi(_psi())
    return max(kernel, of_share(psutil.virtual_memory().percent / 100))


def of_share(used: float) -> Level:
    """From the share of memory in use, 0 to 1."""
    if used >= CROWDED:
        return Level.CRITICAL
    return Level.HIGH if used >= FULL else Level.CALM


def of_psi(text: str) -> Level:
    """From the text of /proc/pressure/memory; calm where there is none."""
    for word in text.split():
        if word.startswith("avg10="):
            stalled = float(word.removeprefix("avg10="))
            if stalled >= CHOKING:
                return Level.CRITICAL
            return Level.HIGH if stalled >= STALLING else Level.CALM
    return Level.CALM


def of_mac(value: int) -> Level:
    """From kern.memorystatus_vm_pressure_level."""
    return Level(MAC_LEVELS.get(value, 0))


def _psi() -> str:
    try:
        return PSI.read_text()
    except OSError:
        return ""


def _mac() -> int:
    command = ["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True, timeout=5).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 1
