"""Floors: minimum time for new tokens, and disk reads into arrays."""

import time
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import trim_prompt_cache

from mlxstack.bench.dev.in_process.contestants import FIRST, evaluate, filled
from mlxstack.bench.dev.in_process.full_engine import N_VOCAB, seconds_per_step
from mlxstack.bench.dev.trials import (
    BatchAnswers,
    BenchResult,
    LoadFiles,
    SingleFloor,
    TrialSamples,
)
from mlxstack.engine.loading.loader import LoadedModel

STEP = 2048
"""mlx-lm's own `prefill_step_size`."""


def floor(trial: SingleFloor, loaded: LoadedModel) -> BenchResult:
    """Prefill, then decode the next token, as mlx-lm does."""
    caches = filled(loaded.model, trial.n_context) if trial.n_context else []
    times = []
    for i in range(trial.passes + 1):
        if not trial.n_context:
            caches = filled(loaded.model, 1)
        began = time.perf_counter()
        tokens = [FIRST + (n + i) % 97 for n in range(trial.n_new)]
        for start in range(0, trial.n_new - 1, STEP):
            loaded.model(
                mx.array([tokens[start : min(start + STEP, trial.n_new - 1)]]), cache=caches
            )
            evaluate(caches)
        mx.eval(mx.argmax(loaded.model(mx.array([tokens[-1:]]), cache=caches)[:, -1], axis=-1))
        if i:
            times.append(time.perf_counter() - began)
        trim_prompt_cache(caches, trial.n_new)
    return BenchResult((TrialSamples("floor", "ttft_s", tuple(times)),))


def batch_answers(trial: BatchAnswers, loaded: LoadedModel) -> BenchResult:
    """Time the steps of a whole BatchGenerator, once per pass."""
    times = [_answers_step_s(trial, loaded.model, seed) for seed in range(trial.passes)]
    return BenchResult((TrialSamples("theirs", "step_s", tuple(times)),))


def _answers_step_s(trial: BatchAnswers, model: Any, seed: int) -> float:
    random = Random(seed)
    prompts = [random.choices(range(N_VOCAB), k=trial.n_prompt) for _ in range(trial.n_rows)]
    generator = BatchGenerator(model, max_tokens=trial.n_tokens)
    first: dict[int, float] = {}
    tokens: list[float] = []
    ends: list[float] = []
    generator.insert(prompts)
    while len(ends) < trial.n_rows:
        _, responses = generator.next()
        now = time.perf_counter()
        for response in responses:
            first.setdefault(response.uid, now)
            tokens.append(now)
            ends += [now] if response.finish_reason else []
    generator.close()
    return seconds_per_step(first.values(), tokens, ends)


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
