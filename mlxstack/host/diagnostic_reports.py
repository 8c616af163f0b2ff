"""Diagnostic reports of macOS: panics, GPU restarts and crashes since a time."""

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from mlxstack.host.macos import GPU_DRIVER, MAX_REPORT_BYTES, PANIC_REPORTS

FOLDERS = (PANIC_REPORTS, Path("~/Library/Logs/DiagnosticReports").expanduser())
"""Reports of the system, and of programs of this user."""

GPU_NAMES = ("panic", "iogpu", "gpuevent")
"""Parts of the names of reports of panics and GPU restarts, in lower case."""

PANIC = re.compile(r"panic\(cpu.*?(?=\\n|\n|$)")
"""First line of a panic, also inside the JSON of a report."""


class DiagnosticReport(Struct, frozen=True):
    """Path of a report, and first line of its panic."""

    path: str
    panic: str = ""

    def __str__(self) -> str:
        if self.panic:
            return f"{self.path}: {self.panic}"
        return self.path


def reports_since(
    since: float, pid: int, folders: Sequence[Path] | None = None
) -> tuple[DiagnosticReport, ...] | None:
    """Reports on GPU and process since a Unix time, oldest first.

    None but on macOS. Unreadable ones are left out, unless their name is of the GPU.
    """
    if platform.system() != "Darwin":
        return None
    written: list[tuple[float, Path]] = []
    for folder in folders or FOLDERS:
        for file in folder.glob("*"):
            with suppress(OSError):
                written_at = file.stat().st_mtime
                if written_at >= since and file.is_file() and _concerns(file, pid):
                    written.append((written_at, file))
    return tuple(_report(file) for _, file in sorted(written))


def _concerns(file: Path, pid: int) -> bool:
    """Whether a report is on the GPU or on a process."""
    if any(part in file.name.lower() for part in GPU_NAMES):
        return True
    text = _head(file)
    named = re.compile(rb'(?:"pid"\s*:\s*|\[)%d\b' % pid)
    return GPU_DRIVER in text or named.search(text) is not None


def _report(file: Path) -> DiagnosticReport:
    text = ""
    with suppress(OSError):
        text = _head(file).decode(errors="replace")
    panic = PANIC.search(text)
    return DiagnosticReport(str(file), panic[0].replace('\\"', '"') if panic else "")


def _head(file: Path) -> bytes:
    with file.open("rb") as report:
        return report.read(MAX_REPORT_BYTES)
