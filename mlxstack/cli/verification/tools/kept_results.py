"""Results of `verify --tools`, kept for the lists of models and presets."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from mlxstack.host.home import Home, make_home
from mlxstack.host.services import read_json, write_json

T = TypeVar("T")


class RepairSummary(Struct, frozen=True):
    """Whether a repair was solved."""

    is_solved: bool


class ToolSummary(Struct, frozen=True):
    """The counts of a kept report, which the lists show."""

    model: str
    n_calls: int
    n_valid: int
    repairs: tuple[RepairSummary, ...] = ()

    def __str__(self) -> str:
        text = f"{self.n_valid}/{self.n_calls}"
        if self.repairs:
            n_solved = sum(repair.is_solved for repair in self.repairs)
            text += f", repairs {n_solved}/{len(self.repairs)}"
        return text


def report_path(home: Home, model: str) -> Path:
    """File of the last report on a model."""
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return home.tool_reports / f"{digest}.json"


def keep(home: Home, model: str, report: Struct) -> Path:
    """Replace the last report on a model. Raises OSError."""
    make_home(home)
    home.tool_reports.mkdir(mode=0o700, exist_ok=True)
    path = report_path(home, model)
    write_json(path, report)
    return path


def summaries(home: Home) -> dict[str, ToolSummary]:
    """Kept results by hub id or folder; unreadable ones are left out."""
    return {summary.model: summary for summary in kept(home, ToolSummary)}


def kept(home: Home, kind: type[T]) -> Iterator[T]:
    """All kept reports, read as `kind`."""
    for path in sorted(home.tool_reports.glob("*.json")):
        report = read_json(path, kind)
        if report is not None:
            yield report
