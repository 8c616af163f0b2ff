"""Facts of macOS: version, wired limit, panics, Local Network Privacy."""

import errno
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

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


@cache
def macos_version() -> tuple[int, ...]:
    """Version of macOS; empty elsewhere."""
    return tuple(int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit())


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
    return f"; {LOCAL_NETWORK}" if is_local_network_refused(error) else ""


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
