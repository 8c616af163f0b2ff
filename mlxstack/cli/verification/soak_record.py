"""Record of a soak on disk, which outlives a panic."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.formatting import span
from mlxstack.core.preset import Preset, Wired
from mlxstack.host.diagnostic_reports import DiagnosticReport, reports_since
from mlxstack.host.home import Home
from mlxstack.host.process import ProcessId, identify, is_alive
from mlxstack.host.services import read_json
from mlxstack.store.files import Disk, write_atomic


class SoakCounts(Struct, kw_only=True):
    """Sums over all rounds; bytes are those of the largest moment."""

    n_answers: int = 0
    n_compared: int = 0
    n_different: int = 0
    longest_pause_s: float = 0.0
    active_bytes: int = 0
    kv_bytes: int = 0


class SoakRecord(Struct, frozen=True, kw_only=True):
    """State of a soak after its last round; times are of Unix."""

    preset: str
    wired: Wired
    wanted_s: float
    process: ProcessId
    started_at: float
    updated_at: float
    counts: SoakCounts
    n_rounds: int = 0
    has_ended: bool = False


class InterruptedSoak(Struct, frozen=True):
    """A soak without an end, and reports of macOS since then."""

    record: SoakRecord
    reports: tuple[DiagnosticReport, ...] | None

    def __str__(self) -> str:
        record = self.record
        lasted = span(record.updated_at - record.started_at)
        line = (
            f"a soak of {record.preset} for {span(record.wanted_s)} ended after {lasted} and "
            f"{record.n_rounds} rounds without an end (device.wired is {record.wired})"
        )
        newer = "; ".join(map(str, self.reports or ()))
        if newer:
            return f"{line}; newer: {newer}"
        return line


class SoakRecorder:
    """Writes the record of a soak at start, rounds and end."""

    def __init__(self, home: Home, preset: Preset, wanted_s: float) -> None:
        process = identify(os.getpid())
        assert process is not None
        self._home = home
        self.record = SoakRecord(
            preset=preset.name,
            wired=preset.device.wired,
            wanted_s=wanted_s,
            process=process,
            started_at=time.time(),
            updated_at=time.time(),
            counts=SoakCounts(),
        )
        self._write()

    def keep(self, counts: SoakCounts) -> None:
        """Record another round. Raises StackError when the disk refuses."""
        self._write(counts=counts, n_rounds=self.record.n_rounds + 1)

    def end(self) -> None:
        """Record an end: the report, an error or an interrupt."""
        self._write(has_ended=True)

    def reports(self) -> tuple[DiagnosticReport, ...] | None:
        """Reports of macOS since the start; None elsewhere."""
        return reports_since(self.record.started_at, self.record.process.pid)

    def _write(self, **changes: Any) -> None:
        self.record = replace(self.record, updated_at=time.time(), **changes)
        data = msgspec.json.format(msgspec.json.encode(self.record), indent=1)
        write_atomic(self._home.soak_file, [data], Disk())


@contextmanager
def recorded(home: Home, preset: Preset, wanted_s: float) -> Iterator[SoakRecorder]:
    """Record a soak, and its end also after an error. Raises StackError."""
    recorder = SoakRecorder(home, preset, wanted_s)
    try:
        yield recorder
    except SystemExit:  # ended by SIGTERM, which its user may not have sent
        raise
    except BaseException:
        recorder.end()
        raise
    recorder.end()


def interrupted_soak(home: Home) -> InterruptedSoak | None:
    """The last soak, if it neither ended nor runs."""
    record = read_json(home.soak_file, SoakRecord)
    if record is None or record.has_ended or is_alive(record.process):
        return None
    return InterruptedSoak(record, reports_since(record.started_at, record.process.pid))
