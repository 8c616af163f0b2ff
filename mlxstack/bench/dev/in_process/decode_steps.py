"""KV bytes and step times: our batch, mlx-lm's, single rows."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxstack.bench.dev.in_process.contestants import FIRST, Ours, OursExact, Theirs, filled
from mlxstack.bench.dev.trials import BenchResult, ExactSteps, Steps, TrialSamples
from mlxstack.engine import device
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.features.exact.row_floors import measured_layers, set_floors

Side = Ours | Theirs

SETTLING = 30
"""First steps of a batch, whose arrays change in them."""

STRETCH = 5
"""Steps of one side before it is the other's turn."""


def steps(trial: Steps, loaded: LoadedModel) -> BenchResult:
    """Time a few steps of both batches by turns."""
    model = loaded.model
    contexts = trial.contexts

    def caches() -> list[list[Any]]:
        return [filled(model, n, seed=i) for i, n in enumerate(contexts)]

    ours, ours_bytes = grown(lambda: ran(Ours(model, caches())))
    theirs, theirs_bytes = grown(lambda: ran(Theirs(model, caches())))
    alone = sum(grown(lambda n=n: _alone(model, n))[1] for n in contexts)  # type: ignore[misc]
    times: dict[str, list[float]] = {ours.who: [], theirs.who: []}
    for _ in range(trial.passes):
        for who, step_s in by_turns((ours, theirs), trial.n_steps).items():
            times[who].append(step_s)
    return BenchResult(
        (
            TrialSamples("ours", "bytes", (ours_bytes,)),
            TrialSamples("theirs", "bytes", (theirs_bytes,)),
            TrialSamples("alone", "bytes", (alone,)),
            *(TrialSamples(who, "step_s", tuple(values)) for who, values in times.items()),
        )
    )


def exact_steps(trial: ExactSteps, loaded: LoadedModel) -> BenchResult:
    """Time steps of rows with equal bits, and without, by turns."""
    model = loaded.model
    set_floors(measured_layers(model, lambda: True) or [])
    caches = [[filled(model, n, seed=i) for i, n in enumerate(trial.contexts)] for _ in range(2)]
    sides = (ran(Ours(model, caches[0], is_stacking=False)), ran(OursExact(model, caches[1])))
    measured = [by_turns(sides, trial.n_steps) for _ in range(trial.passes)]
    return BenchResult(
        tuple(
            TrialSamples(side.who, "step_s", tuple(step_s[side.who] for step_s in measured))
            for side in sides
        )
    )


def by_turns(sides: Sequence[Side], n_steps: int) -> dict[str, float]:
    """Seconds per step, from short alternating stretches."""
    stretches = max(1, n_steps // STRETCH)
    total = {side.who: 0.0 for side in sides}
    for i in range(stretches):
        for side in sides if i % 2 == 0 else reversed(sides):
            total[side.who] += timed(side, STRETCH)
    return {who: seconds / (stretches * STRETCH) for who, seconds in total.items()}


def timed(side: Side, n_steps: int) -> float:
    """Seconds of `n` steps with a filled pipeline."""
    side.step()
    side.finish()
    began = time.perf_counter()
    for _ in range(n_steps):
        side.step()
    side.finish()
    return time.perf_counter() - began


def grown(build: Callable[[], Any]) -> tuple[Any, int]:
    """Build a batch; return it and its bytes of memory."""
    before = _active()
    built = build()
    return built, _active() - before


def _active() -> int:
    gc.collect()
    mx.synchronize()
    device.release()
    return int(mx.get_active_memory())


def ran(side: Side) -> Side:
    """The batch after its first steps, which make room and stack rows."""
    for _ in range(SETTLING):
        side.step()
    side.finish()
    return side


def _alone(model: Any, n_tokens: int) -> list[Any]:
    caches = filled(model, n_tokens)
    for _ in range(3):
        mx.eval(model(mx.array([[FIRST]]), cache=caches))
    return caches
