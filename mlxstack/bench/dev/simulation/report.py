"""Report of a simulation: waiting times by priority."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.request import Priority


class SimulatedRequest(Struct, frozen=True):
    """Served request: seconds until its slot, and until its first token."""

    priority: Priority
    waited_s: float
    ttft_s: float
    n_prompt: int
    n_generated: int


class Percentiles(Struct, frozen=True):
    """Median, 95th percentile and maximum, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    max: float = 0.0


class Waits(Struct, frozen=True):
    """Waiting times of one priority: until slot, until first token."""

    priority: Priority
    n_asks: int
    waited: Percentiles
    ttft: Percentiles


class SimulationReport(Struct, frozen=True):
    """A simulation of `span_s` seconds, during `busy_s` of which the machine worked.

    `longest_silence_s` is the longest time between two tokens of one answer. `n_refused` counts
    attempts that met a full queue, `n_warm` requests that found their own slot again, `n_computed`
    prompt tokens that no cache held.
    """

    waits: tuple[Waits, ...]
    n_asks: int
    n_prompt: int
    n_generated: int
    span_s: float
    busy_s: float
    longest_silence_s: float
    n_refused: int
    n_warm: int
    n_computed: int

    @property
    def tps(self) -> float:
        """Generated tokens per second of work."""
        if self.busy_s:
            return self.n_generated / self.busy_s
        return 0.0


def report_of(samples: Sequence[SimulatedRequest], **measured: float) -> SimulationReport:
    """Sum up the samples; `measured` are its other fields."""
    return SimulationReport(
        waits=tuple(w for p in Priority if (w := _waits(samples, p)).n_asks),
        n_asks=len(samples),
        n_prompt=sum(s.n_prompt for s in samples),
        n_generated=sum(s.n_generated for s in samples),
        **measured,  # type: ignore[arg-type]
    )


def _waits(samples: Sequence[SimulatedRequest], priority: Priority) -> Waits:
    own = [sample for sample in samples if sample.priority is priority]
    waited = _spread([sample.waited_s for sample in own])
    ttft = _spread([sample.ttft_s for sample in own])
    return Waits(priority, len(own), waited, ttft)


def _spread(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles()
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(ordered[last // 2], ordered[last * 95 // 100], ordered[-1])
