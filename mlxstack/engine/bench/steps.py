"""Bytes of a batch's KV and time of its steps: ours, theirs, and each row alone."""

import gc
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxstack.core.trial import Finding, Samples, Steps
from mlxstack.engine.bench.rows import FIRST, Ours, Theirs, filled
from mlxstack.engine.loader import Loaded

Side = Ours | Theirs


def steps(trial: Steps, loaded: Loaded) -> Finding:
    """Both batches live side by side; each pass times one after the other, by turns."""
    model, contexts = loaded.model, trial.contexts

    def caches() -> list[list[Any]]:
        return [filled(model, n, seed=i) for i, n in enumerate(contexts)]

    ours, ours_bytes = grown(lambda: _ran(Ours(model, caches())))
    theirs, theirs_bytes = grown(lambda: _ran(Theirs(model, caches())))
    alone = sum(grown(lambda n=n: _alone(model, n))[1] for n in contexts)  # type: ignore[misc]
    times: dict[str, list[float]] = {ours.who: [], theirs.who: []}
    for i in range(trial.passes):
        for side in (ours, theirs) if i % 2 == 0 else (theirs, ours):
            times[side.who].append(timed(side, trial.n_steps))
    return Finding(
        (
            Samples("ours", "bytes", (ours_bytes,)),
            Samples("theirs", "bytes", (theirs_bytes,)),
            Samples("alone", "bytes", (alone,)),
            *(Samples(who, "step_s", tuple(values)) for who, values in times.items()),
        )
    )


def timed(side: Side, n_steps: int) -> float:
    """Seconds per step, the pipeline filled before and emptied after."""
    side.step()
    side.finish()
    began = time.perf_counter()
    for _ in range(n_steps):
        side.step()
    side.finish()
    return (time.perf_counter() - began) / n_steps


def grown(build: Callable[[], Any]) -> tuple[Any, int]:
    """What `build` makes, and by how many bytes MLX's active memory has grown for it."""
    before = _active()
    built = build()
    return built, _active() - before


def _active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def _ran(side: Side) -> Side:
    """The first steps make room for the next tokens, which belongs to the bytes of a batch."""
    for _ in range(3):
        side.step()
    side.finish()
    return side


def _alone(model: Any, n_tokens: int) -> list[Any]:
    caches = filled(model, n_tokens)
    for _ in range(3):
        mx.eval(model(mx.array([[FIRST]]), cache=caches))
    return caches
