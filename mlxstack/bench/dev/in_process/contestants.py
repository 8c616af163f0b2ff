"""Contestants: our batch and mlx-lm's, over equal caches."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxstack.core.preset import KVSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.row_grouper import NO_GROUPS
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.exact.engine import ExactPasses
from mlxstack.features.row_stacks.engine import RowStacker

FIRST = 5
"""The token that every row is fed first; which one does not matter."""

SEEN = (1, 2, 3)
ENDLESS = 1 << 30
GREEDY = SamplingParams()


def filled(model: Any, n_tokens: int, seed: int = 0) -> list[Any]:
    """Ordinary caches with random KV of `n_tokens`."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([SEEN[: min(n_tokens, len(SEEN))]]), cache=caches)
    for i, leaf in enumerate(cache_adapters.leaves(caches)):
        if n_tokens > len(SEEN):
            cache_adapters.extend_room(leaf, n_tokens - len(SEEN), seed + i)
    evaluate(caches)
    return caches


def _n_tokens(caches: Sequence[Any]) -> int:
    """Tokens in these caches, which recurrent layers do not count."""
    return max(getattr(leaf, "offset", 0) for leaf in cache_adapters.leaves(caches))


def evaluate(caches: Sequence[Any]) -> None:
    """Compute whatever is still lazy in these caches."""
    states = [cache.state for cache in caches]
    mx.eval([a for _, a in tree_flatten(states) if isinstance(a, mx.array)])


class Ours:
    """Our batch: rows on their own caches, stacked after some steps."""

    who = "ours"

    def __init__(
        self,
        model: Any,
        caches: Sequence[list[Any]],
        *,
        is_stacking: bool = True,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self._sampling = sampling
        self._maker = CacheFactory(model, KVSpec())
        self._batch = Batch(ModelRunner(model), grouper=RowStacker() if is_stacking else NO_GROUPS)
        for layers in caches:
            self.join(self.newcomer(layers))
        self.finish()

    def newcomer(self, caches: list[Any]) -> BatchRow:
        """A row that may join."""
        context = SlotContext(self._maker)
        context.caches, context.tokens = caches, [0] * _n_tokens(caches)
        slot = max((row.slot for row in self._batch.rows), default=-1) + 1
        return BatchRow(slot, context, Sampler(self._sampling, SEEN, 0), FIRST)

    def join(self, row: BatchRow) -> None:
        """Add a row whose KV is in place to the next step."""
        self._batch.join(row)
        self._settle()

    def leave(self) -> None:
        """The last row goes; all KV is in its place."""
        self._batch.leave(self._batch.rows[-1].slot)
        self._settle()

    def step(self) -> None:
        """One token for every row."""
        self._batch.step()

    def finish(self) -> None:
        """Wait until nothing is being computed, nor left to be."""
        self._batch.submit()
        mx.synchronize()

    def _settle(self) -> None:
        for row in self._batch.rows:
            evaluate(row.context.caches)


class OursExact(Ours):
    """Our batch with equal bits, over layers with row floors."""

    who = "exact"

    def __init__(self, model: Any, caches: Sequence[list[Any]]) -> None:
        super().__init__(model, (), is_stacking=False)
        self._batch.runner.mode = ExactPasses()
        for layers in caches:
            self.join(self.newcomer(layers))
        self.finish()


class Theirs:
    """Padded batch as mlx-lm's BatchGenerator drives it."""

    who = "theirs"

    def __init__(
        self, model: Any, caches: Sequence[list[Any]], *, sampling: SamplingParams = GREEDY
    ) -> None:
        self._model = model
        self._sampler = make_sampler(sampling.temperature, sampling.top_p, top_k=sampling.top_k)
        self._n_rows = 0
        self._batch = self._new(caches)
        self.finish()

    def newcomer(self, caches: list[Any]) -> Any:
        """Batch of one row to merge into the running one."""
        alone = self._new([caches])
        self.finish()
        return alone

    def join(self, row: Any) -> None:
        """Add a row whose KV is in place to the next step."""
        with mx.stream(generation_stream):
            self._batch.extend(row)
            evaluate(self._batch.prompt_cache)

    def leave(self) -> None:
        """The last row goes; all KV is in its place."""
        with mx.stream(generation_stream):
            self._batch.filter(list(range(len(self._batch) - 1)))
            evaluate(self._batch.prompt_cache)

    def step(self) -> None:
        """One token for every row."""
        with mx.stream(generation_stream):
            self._batch.next()

    def finish(self) -> None:
        """Wait until nothing is being computed."""
        mx.synchronize(generation_stream)

    def _new(self, caches: Sequence[list[Any]]) -> GenerationBatch:
        n = len(caches)
        uids = list(range(self._n_rows, self._n_rows + n))
        self._n_rows += n
        histories = [[0] * _n_tokens(layers) for layers in caches]
        with mx.stream(generation_stream):
            prompts = PromptProcessingBatch(
                self._model,
                uids,
                list(caches),
                histories,
                samplers=[self._sampler] * n,
                logits_processors=[[] for _ in uids],
                max_tokens=[ENDLESS] * n,
            )
            return prompts.generate([[FIRST]] * n)
