"""Facts of macOS: version, cores of the GPU, panics, Local Network Privacy."""

import errno
import plistlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from msgspec import Struct

SYSTEM_VERSION = ("/bin/cat", "/System/Library/CoreServices/SystemVersion.plist")
GPU_REGISTRY = ("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")
"""I/O Registry entries of the GPU of Apple silicon, as a property list."""
REAL_VERSION = {"SYSTEM_VERSION_COMPAT": "0"}
WAIT_S = 2.0

MIN_MACOS = (14, 0)
"""First version with wheels of MLX."""

PANIC_REPORTS = Path("/Library/Logs/DiagnosticReports")
GPU_DRIVER = b"IOGPU"
MAX_REPORT_BYTES = 4 * 2**20
RECENT_S = 30 * 86400.0

LOCAL_NETWORK = (
    "allow it in System Settings > Privacy & Security > Local Network; a program that was started "
    "in Terminal loses this right when Terminal is closed"
)
"""Remedy for refused calls to the local network (Apple's TN3179, macOS 15 and later)."""


class SystemVersion(Struct, frozen=True):
    """Version and build of macOS (26.2, 25C56); empty where unknown."""

    version: tuple[int, ...] = ()
    build: str = ""

    def __str__(self) -> str:
        number = ".".join(map(str, self.version)) or "of an unknown version"
        if self.build:
            return f"macOS {number} ({self.build})"
        return f"macOS {number}"


@cache
def system_version() -> SystemVersion:
    """Version of macOS; empty elsewhere."""
    if sys.platform == "darwin":
        return _system_version()
    return SystemVersion()


def _system_version() -> SystemVersion:
    """Version by a child without compatibility.

    A process built with an SDK before 26 reads 16.x in the file, and so does `platform.mac_ver`
    (https://github.com/python/cpython/issues/135675).
    """
    facts = _property_list(program_output(SYSTEM_VERSION, env=REAL_VERSION))
    if not isinstance(facts, dict):
        return SystemVersion()
    parts = str(facts.get("ProductVersion", "")).split(".")
    version = tuple(int(part) for part in parts if part.isdigit())
    return SystemVersion(version, str(facts.get("ProductBuildVersion", "")))


def macos_version() -> tuple[int, ...]:
    """Version of macOS; empty elsewhere."""
    return system_version().version


def gpu_cores() -> int | None:
    """Cores of the GPU of Apple silicon; None where unknown."""
    entries = _property_list(program_output(GPU_REGISTRY)) if sys.platform == "darwin" else None
    counts = [entry.get("gpu-core-count") for entry in entries or () if isinstance(entry, dict)]
    return next((count for count in counts if isinstance(count, int)), None)


def gpu_name(device: Mapping[str, Any]) -> str:
    """Name, architecture and cores of the GPU that MLX describes."""
    cores = gpu_cores()
    parts = [device["name"], device["architecture"], f"{cores} cores" if cores else ""]
    return ", ".join(str(part) for part in parts if part)


def program_output(
    command: Sequence[str], wait_s: float = WAIT_S, env: Mapping[str, str] | None = None
) -> bytes:
    """Output of a program; empty where it fails or exceeds `wait_s` seconds."""
    try:
        # Without close_fds CPython spawns instead of forking a process that maps a model.
        done = subprocess.run(
            command, capture_output=True, timeout=wait_s, check=False, close_fds=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout


def _property_list(text: bytes) -> Any:
    """Value of a property list; None where it is none."""
    try:
        return plistlib.loads(text)
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return None


def gpu_panics(folder: Path = PANIC_REPORTS) -> list[Path]:
    """Reports of recent kernel panics in the GPU driver, oldest first.

    Unreadable ones are left out.
    """
    since = time.time() - RECENT_S
    reports: list[tuple[float, Path]] = []
    for file in folder.glob("*.panic"):
        with suppress(OSError):
            written_at = file.stat().st_mtime
            if written_at >= since and _names_gpu(file):
                reports.append((written_at, file))
    return [file for _, file in sorted(reports)]


def is_local_network_refused(error: BaseException) -> bool:
    """Whether macOS may have refused a connection to the local network."""
    return sys.platform == "darwin" and any(
        isinstance(cause, OSError) and cause.errno == errno.EHOSTUNREACH for cause in _causes(error)
    )


def local_network_hint(error: BaseException) -> str:
    """Remedy after a semicolon where macOS may have refused a connection; else ""."""
    if is_local_network_refused(error):
        return f"; {LOCAL_NETWORK}"
    return ""


def _names_gpu(report: Path) -> bool:
    with report.open("rb") as file:
        return GPU_DRIVER in file.read(MAX_REPORT_BYTES)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it came from."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _causes(part)
    before = error.__cause__ or error.__context__
    if before is not None:
        yield from _causes(before)
