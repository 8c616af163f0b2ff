"""Cost of joining and leaving a batch, by its KV."""

import time
from collections.abc import Callable

import mlx.core as mx

from mlxstack.bench.dev.in_process.contestants import Ours, Theirs, filled
from mlxstack.bench.dev.trials import BenchResult, Joins, TrialSamples
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model import cache_adapters


def joins(trial: Joins, loaded: LoadedModel) -> BenchResult:
    """Join and leave times of one row, by turns in both batches."""
    model = loaded.model
    n_present = max(4, trial.n_bytes // _bytes_per_token(loaded))
    sides = (Ours(model, [filled(model, n_present)]), Theirs(model, [filled(model, n_present)]))
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(trial.passes + 1):
        for side in sides:
            side.step()
            side.finish()
            row = side.newcomer(filled(model, trial.n_newcomer, seed=i))
            joined = _timed(lambda side=side, row=row: side.join(row))  # type: ignore[misc]
            side.step()
            side.finish()
            left = _timed(side.leave)
            if i:
                times.setdefault((side.who, "join_s"), []).append(joined)
                times.setdefault((side.who, "leave_s"), []).append(left)
    return BenchResult(tuple(TrialSamples(*name, tuple(values)) for name, values in times.items()))


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _bytes_per_token(loaded: LoadedModel) -> int:
    caches = filled(loaded.model, 4)
    leaves = [leaf for leaf in cache_adapters.leaves(caches) if cache_adapters.is_sliceable(leaf)]
    parts = [part for leaf in leaves for part in cache_adapters.span(leaf, 0, 1)]
    mx.eval(parts)
    return max(1, sum(part.nbytes for part in parts))
