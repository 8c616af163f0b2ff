"""Report of `verify --mac`: one JSON file that grows with each result."""

import os
import time
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.environment import Conditions
from mlxstack.core.formatting import span
from mlxstack.host.home import Home
from mlxstack.host.process import ProcessId, identify, is_alive
from mlxstack.host.services import read_json
from mlxstack.store.files import Disk, write_atomic


class PartResult(Struct, frozen=True):
    """Result of a part as JSON.

    `exit_code` is None until its end, negative for a signal. `last_lines` are those of the error
    output of a part that failed.
    """

    name: str
    seconds: float = 0.0
    exit_code: int | None = None
    result: Any = None
    last_lines: tuple[str, ...] = ()


class MacReport(Struct, frozen=True, kw_only=True):
    """Parts so far; `before` is the report of an interrupted run."""

    wanted: str
    process: ProcessId
    started_at: float
    updated_at: float
    conditions: Conditions
    parts: tuple[PartResult, ...] = ()
    has_ended: bool = False
    before: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether all parts succeeded."""
        return self.has_ended and all(part.exit_code == 0 for part in self.parts)


class InterruptedRun(Struct, frozen=True):
    """A run without an end, and its report."""

    report: MacReport
    path: str

    def __str__(self) -> str:
        report = self.report
        part = "first part"
        if report.parts:
            part = report.parts[-1].name
        lasted = span(report.updated_at - report.started_at)
        return (
            f"`verify --mac {report.wanted}` ended without an end in its {part}, {lasted} after "
            f"its start at the earliest; its report is {self.path}"
        )


class ReportFile:
    """Report on disk, rewritten after each result."""

    def __init__(self, home: Home, model: str, conditions: Conditions) -> None:
        process = identify(os.getpid())
        assert process is not None
        self.path = home.mac_report_file
        interrupted = interrupted_run(home)
        before = ""
        if interrupted is not None:
            # The report of a run that a panic ended is worth the most.
            began = time.strftime("%Y%m%d-%H%M%S", time.localtime(interrupted.report.started_at))
            moved_to = self.path.with_name(f"{self.path.stem}-{began}.json")
            self.path.replace(moved_to)
            before = str(moved_to)
        now = time.time()
        self.report = MacReport(
            wanted=model,
            process=process,
            started_at=now,
            updated_at=now,
            conditions=conditions,
            before=before,
        )
        self._write()

    def put(self, part: PartResult) -> None:
        """Write a part, or replace it. Raises StackError."""
        remaining = tuple(earlier for earlier in self.report.parts if earlier.name != part.name)
        self._write(parts=(*remaining, part))

    def end(self, conditions: Conditions) -> None:
        """Write an end that its user sees. Raises StackError."""
        self._write(conditions=conditions, has_ended=True)

    def _write(self, **changes: Any) -> None:
        self.report = replace(self.report, updated_at=time.time(), **changes)
        data = msgspec.json.format(msgspec.json.encode(self.report), indent=1)
        write_atomic(self.path, [data], Disk())


def interrupted_run(home: Home) -> InterruptedRun | None:
    """The last run, if it neither ended nor goes on."""
    report = read_json(home.mac_report_file, MacReport)
    if report is None or report.has_ended or is_alive(report.process):
        return None
    return InterruptedRun(report, str(home.mac_report_file))
