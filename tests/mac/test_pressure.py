"""Memory pressure: the verdict of the kernel alone where there is one, imitated system calls."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxstack.host import memory_pressure
from mlxstack.host.memory_pressure import PressureLevel

SYSCTL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
    ctypes.c_size_t,
)


def imitate_mac(monkeypatch: pytest.MonkeyPatch, levels: dict[bytes, int]) -> None:
    """A C library whose sysctlbyname knows `levels`, and no child process at all."""

    def answer(name: bytes, value: Any, size: Any, new: Any, n_new: int) -> int:
        assert (new, n_new) == (None, 0)
        if name not in levels or size[0] != ctypes.sizeof(ctypes.c_int):
            return -1
        value[0] = levels[name]
        return 0

    function = SYSCTL(answer)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(sysctlbyname=function))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child process"))


def use(monkeypatch: pytest.MonkeyPatch, percent: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(percent=percent))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, PressureLevel.CALM), (2, PressureLevel.HIGH), (4, PressureLevel.CRITICAL)],
)
@pytest.mark.parametrize("percent", [10.0, 88.0, 99.0])
def test_on_a_mac_the_level_of_the_kernel_alone_decides(
    monkeypatch: pytest.MonkeyPatch, value: int, expected: PressureLevel, percent: float
) -> None:
    imitate_mac(monkeypatch, {b"kern.memorystatus_vm_pressure_level": value})
    use(monkeypatch, percent)
    assert memory_pressure.pressure_level() is expected


@pytest.mark.parametrize("levels", [{}, {b"kern.memorystatus_vm_pressure_level": 77}])
def test_a_mac_that_does_not_tell_is_judged_by_its_used_memory(
    monkeypatch: pytest.MonkeyPatch, levels: dict[bytes, int]
) -> None:
    imitate_mac(monkeypatch, levels)
    use(monkeypatch, 88.0)
    assert memory_pressure.pressure_level() is PressureLevel.HIGH
    use(monkeypatch, 50.0)
    assert memory_pressure.pressure_level() is PressureLevel.CALM


PSI = """\
some avg10={some} avg60=0.00 avg300=0.00 total=1
full avg10={full} avg60=99.00 avg300=99.00 total=1
"""


@pytest.mark.parametrize(
    ("some", "full", "expected"),
    [
        (0.0, 0.0, PressureLevel.CALM),
        (9.99, 9.0, PressureLevel.CALM),
        (10.0, 0.0, PressureLevel.HIGH),
        (95.0, 29.9, PressureLevel.HIGH),
        (60.0, 30.0, PressureLevel.CRITICAL),
    ],
)
def test_on_linux_the_stalls_of_the_kernel_alone_decide(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    some: float,
    full: float,
    expected: PressureLevel,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(memory_pressure, "PSI", tmp_path / "memory")
    (tmp_path / "memory").write_text(PSI.format(some=some, full=full))
    use(monkeypatch, 97.0)
    assert memory_pressure.pressure_level() is expected


def test_a_linux_without_stall_information_is_judged_by_its_used_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(memory_pressure, "PSI", tmp_path / "none")
    for percent, expected in (
        (80.0, PressureLevel.CALM),
        (88.0, PressureLevel.HIGH),
        (96.0, PressureLevel.CRITICAL),
    ):
        use(monkeypatch, percent)
        assert memory_pressure.pressure_level() is expected
