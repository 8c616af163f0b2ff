"""Processes and ports of this machine: alive, listening, terminate."""

import ctypes
import errno
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

BIRTH_TOLERANCE_S = 1.5
LOOK_S = 0.01
"""Seconds between two looks at a process that ends."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REGISTERED_PORTS = range(20_000, 30_000)
"""Below the ports that Linux (from 32,768) and macOS (from 49,152) give out themselves."""


class ProcessId(Struct, frozen=True):
    """Process identity that a reused number cannot match."""

    pid: int
    born: float
    """Creation in seconds since `boot`; without one since the epoch, by the clock of that time."""
    boot: str = ""
    """Id of the boot, where the system has such ids (Linux)."""


def identify(pid: int) -> ProcessId | None:
    """The process that has this number now; None when there is none."""
    try:
        return ProcessId(pid, *_birth(psutil.Process(pid)))
    except psutil.Error:
        return None


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process runs; not a zombie, nor a successor."""
    try:
        now = psutil.Process(process.pid)
        born, boot = _birth(now)
        same = boot == process.boot and abs(born - process.born) < BIRTH_TOLERANCE_S
        return same and now.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ask_to_stop(process: ProcessId) -> None:
    """SIGTERM, if it is still this process."""
    _signal(process, signal.SIGTERM)


def kill(process: ProcessId) -> None:
    """SIGKILL, if it is still this process."""
    _signal(process, signal.SIGKILL)


def end(process: ProcessId, patience_s: float) -> None:
    """SIGTERM, and SIGKILL after `patience_s` seconds."""
    ask_to_stop(process)
    if not wait_gone(process, patience_s):
        kill(process)
        wait_gone(process, 5.0)


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Whether the process ended within `timeout_s` seconds.

    psutil would wait until its parent has read the exit status too.
    """
    until = time.monotonic() + timeout_s
    while is_alive(process):
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_S)
    with suppress(psutil.Error):
        psutil.Process(process.pid).wait(0)
    return True


def held_bytes(pid: int) -> int:
    """Memory that a process holds; 0 when it is gone.

    Its physical footprint on macOS, because Metal buffers and compressed pages are not part of
    its resident memory; resident memory elsewhere, and where the kernel does not tell.
    """
    footprint = _footprint_bytes(pid) if sys.platform == "darwin" else None
    if footprint is not None:
        return footprint
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def refusal(host: str, port: int) -> OSError | None:
    """Error of listening there, such as EADDRINUSE; None if free.

    Some systems let one bind beside a wildcard listener and take its calls: so we also call.
    """
    family = _family(host)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        if caller.connect_ex((reachable(host), port)) == 0:
            return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return None


def _family(host: str) -> socket.AddressFamily:
    if ":" in host:
        return socket.AF_INET6
    return socket.AF_INET


def reachable(host: str) -> str:
    """Local address of a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def free_port(host: str) -> int:
    """A free port, if possible below those that systems give to connections.

    Raises OSError if `host` is no address of this machine.
    """
    for port in random.sample(REGISTERED_PORTS, 10):
        if refusal(host, port) is None:
            return port
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listener(port: int) -> str | None:
    """Process that listens on a port, `name (pid 123)`, or None."""
    for process in psutil.process_iter(["pid", "name"]):
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        for connection in connections:
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr[1] == port
            ):
                return f"{process.info['name']} (pid {process.info['pid']})"
    return None


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of sys/resource.h."""

    _fields_ = [
        ("ri_uuid", ctypes.c_uint8 * 16),
        *((f"ri_{name}", ctypes.c_uint64) for name in (
            "user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups", "pageins",
            "wired_size", "resident_size", "phys_footprint", "proc_start_abstime",
            "proc_exit_abstime",
        )),
    ]  # fmt: skip


def _footprint_bytes(pid: int) -> int | None:
    """`ri_phys_footprint` of proc_pid_rusage, as Activity Monitor shows it; None if unknown."""
    info = _RusageInfo()
    try:
        call = ctypes.CDLL(None).proc_pid_rusage
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    if call(pid, 0, ctypes.byref(info)):
        return None
    return int(info.ri_phys_footprint)


def _birth(process: psutil.Process) -> tuple[float, str]:
    """Birth on Linux since the boot: wall time jumps with the clock."""
    if not BOOT_ID.exists():
        # psutil adds the steps of the clock since its import to `create_time()`: a process would
        # change its birth. Its platform module has what the kernel wrote down; where another
        # version of psutil names it differently, steps count.
        try:
            born: float = process._proc.create_time(monotonic=True)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            born = process.create_time()
        return born, ""
    return process.create_time() - psutil.boot_time(), BOOT_ID.read_text().strip()


def _signal(process: ProcessId, number: signal.Signals) -> None:
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
