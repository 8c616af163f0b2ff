"""The memory of a process on macOS is its physical footprint; the system call is imitated."""

import ctypes
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxstack.host.process import held_bytes

RUSAGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)

# struct rusage_info_v0: 16 bytes of uuid, then 64-bit numbers; the eighth is ri_phys_footprint.
FOOTPRINT_AT = 16 + 7 * 8


def imitate_mac(monkeypatch: pytest.MonkeyPatch, footprints: dict[int, int]) -> None:
    def answer(pid: int, flavor: int, buffer: Any) -> int:
        if flavor != 0 or pid not in footprints:
            return -1
        ctypes.c_uint64.from_address(buffer + FOOTPRINT_AT).value = footprints[pid]
        return 0

    function = RUSAGE(answer)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(proc_pid_rusage=function))


def test_a_mac_tells_the_physical_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_mac(monkeypatch, {4711: 31 * 2**30})
    assert held_bytes(4711) == 31 * 2**30


def test_where_the_kernel_does_not_tell_it_is_the_resident_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate_mac(monkeypatch, {})
    assert held_bytes(os.getpid()) > 10**6
    assert held_bytes(2**22 + 1) == 0
