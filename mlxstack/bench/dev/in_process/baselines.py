"""Floors: minimum time for new tokens, and disk reads into arrays."""

import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache

from mlxstack.bench.dev.in_process.contestants import FIRST, evaluate, filled
from mlxstack.bench.dev.trials import BenchResult, LoadFiles, SingleFloor, TrialSamples
from mlxstack.engine.model.loader import LoadedModel

STEP = 2048
"""mlx-lm's own `prefill_step_size`."""


def floor(trial: SingleFloor, loaded: LoadedModel) -> BenchResult:
    """Prefill all but the last new token, then feed it and read the next one, as mlx-lm does."""
    caches = filled(loaded.model, trial.n_context) if trial.n_context else []
    times = []
    for i in range(trial.passes + 1):
        if not trial.n_context:
            caches = filled(loaded.model, 1)
        began = time.perf_counter()
        tokens = [FIRST + (n + i) % 97 for n in range(trial.n_new)]
        for at in range(0, trial.n_new - 1, STEP):
            loaded.model(mx.array([tokens[at : min(at + STEP, trial.n_new - 1)]]), cache=caches)
            evaluate(caches)
        mx.eval(mx.argmax(loaded.model(mx.array([tokens[-1:]]), cache=caches)[:, -1], axis=-1))
        if i:
            times.append(time.perf_counter() - began)
        trim_prompt_cache(caches, trial.n_new)
    return BenchResult((TrialSamples("floor", "ttft_s", tuple(times)),))


def load(trial: LoadFiles) -> BenchResult:
    """All files, read and evaluated, once."""
    files = sorted(Path(trial.folder).rglob("*.safetensors"))
    began = time.perf_counter()
    arrays = [array for file in files for array in mx.load(str(file)).values()]  # type: ignore[union-attr]
    mx.eval(arrays)
    took = time.perf_counter() - began
    n_bytes = sum(array.nbytes for array in arrays)
    return BenchResult(
        (TrialSamples("mx.load", "load_s", (took,)), TrialSamples("mx.load", "bytes", (n_bytes,)))
    )
