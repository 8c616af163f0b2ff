"""Memory pressure as reported by the kernel.

macOS: kern.memorystatus_vm_pressure_level (1 normal, 2 warning, 4 critical). Linux: pressure
stall information (PSI). Both know what the share of used memory does not: how much of it the
kernel can take back without harm. A Mac with a model in memory is rarely below 85 % in use.
Only where neither exists the share of memory in use decides.
"""

import ctypes
import re
import sys
from enum import IntEnum
from pathlib import Path

import psutil

FULL = 0.85
CROWDED = 0.95
PSI = Path("/proc/pressure/memory")

SOME_STALLED = 10.0
"""Percent of ten seconds in which a task waited for memory.

Less is normal, as while a model file is read and old page cache makes room for it. Android's low
memory killer reacts at 7 % (70 ms of a second), for the latency of a screen.
"""

ALL_STALLED = 30.0
"""Threshold in percent of ten seconds of full memory stalls.

Half of the 60 % at which systemd-oomd kills by default, so that KV goes before a process does.
"""

AVERAGE = re.compile(r"(?P<kind>some|full) avg10=(?P<avg10>\d+(?:\.\d+)?)")
MAX_TEXT_BYTES = 256
PRESSURE_LEVEL = b"kern.memorystatus_vm_pressure_level"


class PressureLevel(IntEnum):
    """CALM, HIGH: cold things should go, CRITICAL: everything that may."""

    CALM = 0
    HIGH = 1
    CRITICAL = 2


MAC_LEVELS = {1: PressureLevel.CALM, 2: PressureLevel.HIGH, 4: PressureLevel.CRITICAL}


def pressure_level() -> PressureLevel:
    """Pressure level of the kernel, or else by the used share."""
    is_mac = sys.platform == "darwin"
    level = MAC_LEVELS.get(sysctl(PRESSURE_LEVEL) or 0) if is_mac else of_psi(_psi())
    if level is None:
        return of_share(psutil.virtual_memory().percent / 100)
    return level


def of_share(used: float) -> PressureLevel:
    """Level of the share of memory in use, 0 to 1."""
    if used >= CROWDED:
        return PressureLevel.CRITICAL
    if used >= FULL:
        return PressureLevel.HIGH
    return PressureLevel.CALM


def of_psi(text: str) -> PressureLevel | None:
    """Level of /proc/pressure/memory; None when it has no averages of ten seconds."""
    stalled: dict[str, float] = {}
    for line in text.splitlines():
        if average := AVERAGE.match(line):
            stalled[average["kind"]] = float(average["avg10"])
    if not stalled:
        return None
    if stalled.get("full", 0.0) >= ALL_STALLED:
        return PressureLevel.CRITICAL
    if stalled.get("some", 0.0) >= SOME_STALLED:
        return PressureLevel.HIGH
    return PressureLevel.CALM


def sysctl(name: bytes) -> int | None:
    """Integer sysctl of macOS, without a child process; None if missing."""
    value = ctypes.c_int(0)
    if _sysctl(name, value):
        return value.value
    return None


def sysctl_text(name: bytes) -> str:
    """Text sysctl of macOS, without a child process; empty if missing."""
    value = ctypes.create_string_buffer(MAX_TEXT_BYTES)
    if _sysctl(name, value):
        return value.value.decode(errors="replace")
    return ""


def _sysctl(name: bytes, value: ctypes.Array[ctypes.c_char] | ctypes.c_int) -> bool:
    """Whether `value` was read."""
    size = ctypes.c_size_t(ctypes.sizeof(value))
    try:
        call = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError):
        return False
    call.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    return bool(call(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0)


def _psi() -> str:
    """Empty where the kernel has no PSI, or has it switched off."""
    try:
        return PSI.read_text()
    except OSError:
        return ""
