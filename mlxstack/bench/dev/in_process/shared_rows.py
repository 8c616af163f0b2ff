"""Rows on a common prefix, with live sharing and without; forks."""

import time
from functools import partial
from typing import Any

import mlx.core as mx

from mlxstack.bench.dev.in_process.contestants import Ours, Theirs, evaluate, filled
from mlxstack.bench.dev.in_process.decode_steps import by_turns, grown, ran
from mlxstack.bench.dev.trials import BenchResult, Forks, SharedRows, TrialSamples
from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode.attention_costs import measure_sharing
from mlxstack.engine.kv.live_prefix import LivePrefix
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.loader import LoadedModel
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.policy.kv.shared_prefixes import MIN_TOKENS, LiveSharing, least_shared

N_OWN = 200


class Off(Ours):
    """Every row on a copy of the prefix."""

    who = "off"


class On(Ours):
    """All rows on one copy of a prefix that is long enough."""

    who = "on"

    def __init__(self, model: Any, rows: list[list[Any]], n_shared: int) -> None:
        super().__init__(model, [])
        n_tokens, first = LiveSharing(min_tokens=MIN_TOKENS).split_point(n_shared), None
        while rows:
            row = self.newcomer(rows.pop(0))
            if n_tokens and first is None:
                first = row.context.share(n_tokens)
            elif first is not None:
                row.context.adopt(first)
            self.join(row)
        self.finish()


def shared_rows(trial: SharedRows, loaded: LoadedModel) -> BenchResult:
    """Time a few steps of each contestant by turns."""
    model = loaded.model

    def rows() -> list[list[Any]]:
        return [_row(model, trial.n_shared, trial.n_own, i) for i in range(trial.n_rows)]

    off, off_bytes = grown(lambda: ran(Off(model, rows())))
    on, on_bytes = grown(lambda: ran(On(model, rows(), trial.n_shared)))
    theirs, theirs_bytes = grown(lambda: ran(Theirs(model, rows())))
    n_bytes = {"on": on_bytes, "off": off_bytes, "theirs": theirs_bytes}
    times: dict[str, list[float]] = {who: [] for who in n_bytes}
    for _ in range(trial.passes):
        for who, step_s in by_turns((off, on, theirs), trial.n_steps).items():
            times[who].append(step_s)
    return BenchResult(
        (
            *(TrialSamples(who, "bytes", (float(value),)) for who, value in n_bytes.items()),
            *(TrialSamples(who, "step_s", tuple(values)) for who, values in times.items()),
        )
    )


def forks(trial: Forks, loaded: LoadedModel) -> BenchResult:
    """Third row on each shared prefix."""
    maker = CacheFactory(loaded.model, KVSpec())
    found = least_shared(measure_sharing(ModelRunner(loaded.model), maker))
    samples = [TrialSamples("policy", "least shared tokens", (float(found or 0),))]
    for n in trial.lengths:
        donor = SlotContext(maker)
        donor.caches, donor.tokens = _row(loaded.model, n, N_OWN, 0), [0] * (n + N_OWN)
        prefix = donor.share(n)
        each = [grown(partial(_forked, donor, prefix)) for _ in range(trial.passes)]
        samples.append(TrialSamples(str(n), "fork_s", tuple(one[0] for one, _ in each)))
        samples.append(TrialSamples(str(n), "bytes", tuple(float(size) for _, size in each)))
    return BenchResult(tuple(samples))


def _forked(donor: SlotContext, prefix: LivePrefix) -> tuple[float, SlotContext]:
    fresh = donor.new_empty()
    began = time.perf_counter()
    fresh.fork_from(donor, len(donor), prefix)
    mx.synchronize()
    return time.perf_counter() - began, fresh


def _row(model: Any, n_shared: int, n_own: int, seed: int) -> list[Any]:
    """Caches whose first tokens are those of every row."""
    caches = filled(model, max(1, n_shared))
    for i, leaf in enumerate(cache_adapters.leaves(caches)):
        cache_adapters.extend_room(leaf, n_own, 1000 * (seed + 1) + i)
    evaluate(caches)
    return caches
