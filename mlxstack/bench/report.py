"""Report of a benchmark: conditions, tables, targets met or missed."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.bench.bar_chart import BarChart
from mlxstack.bench.statistics import times


class ReportTable(Struct, frozen=True):
    """Cells are texts for people; `note` says how to read them."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class BenchTarget(Struct, frozen=True):
    """A measured `value` that should be at most, or at least, `bound`; `unit` "x" is a ratio."""

    name: str
    value: float
    bound: float
    is_met: bool
    is_upper: bool
    unit: str = "x"


class Conditions(Struct, frozen=True):
    """Machine and versions; `load` is the system's average of a minute before."""

    day: str
    machine: str
    versions: dict[str, str]
    model: str
    blas: str
    load: float


class BenchReport(Struct, frozen=True):
    """One run of one benchmark. `raw` are the samples behind the tables, by name."""

    name: str
    command: str
    conditions: Conditions
    tables: tuple[ReportTable, ...]
    targets: tuple[BenchTarget, ...] = ()
    raw: dict[str, tuple[float, ...]] = {}
    charts: tuple[BarChart, ...] = ()


class Results(Struct, frozen=True):
    """The part of a report that a benchmark itself fills."""

    tables: tuple[ReportTable, ...]
    targets: tuple[BenchTarget, ...] = ()
    raw: dict[str, tuple[float, ...]] = {}
    charts: tuple[BarChart, ...] = ()


def at_most(name: str, value: float, bound: float, unit: str = "x") -> BenchTarget:
    """A target that small values meet."""
    return BenchTarget(name, value, bound, value <= bound, is_upper=True, unit=unit)


def at_least(name: str, value: float, bound: float, unit: str = "x") -> BenchTarget:
    """A target that great values meet."""
    return BenchTarget(name, value, bound, value >= bound, is_upper=False, unit=unit)


def targets_table(targets: Sequence[BenchTarget]) -> ReportTable:
    """All targets with what came out."""
    rows = tuple(
        (
            one.name,
            f"{'at most' if one.is_upper else 'at least'} {_figure(one.bound, one.unit)}",
            _figure(one.value, one.unit),
            "met" if one.is_met else "MISSED",
        )
        for one in targets
    )
    return ReportTable("Targets", ("Target", "Bound", "Measured", "Result"), rows)


def _figure(value: float, unit: str) -> str:
    return times(value) if unit == "x" else f"{value:.4g} {unit}"
