"""Check at load: bits of rows in company, as drafts, in chunks."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory, LayerState
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.features.exact.policy import Costs, cost_of

LENGTHS = (5, 9, 7, 5, 12, 3, 8, 6)
"""Tokens of the rows, two of which are even; the third is lengthened."""
N_LONG = 250
"""Random KV of the long row, which crosses a block of keys and leaves a window's ring."""
N_CHUNKS = 24
"""Tokens of the prompt that is computed in chunks, after `N_LONG` of random KV."""
CUTS = ((3, 9), (7,), (23,))
"""Ends of its chunks."""
N_SINGLE = 3
"""Last tokens of it that are decoded too."""
N_DRAFTED = 4
N_TIMED = 96
"""Tokens of the timed prefill chunk."""
N_TRIES = 3


class PassBits(Struct, frozen=True):
    """Whether tokens have equal bits in other passes than decode steps."""

    drafts: bool
    """Tokens that are verified in one pass, and single ones."""
    chunks: bool
    """A prompt in any chunks."""
    decoded: bool
    """Decoded tokens, and tokens of a chunk."""


class BitCheck:
    """Compares passes of a model bit for bit."""

    def __init__(
        self, runner: ModelRunner, factory: CacheFactory, n_vocab: int, widths: Sequence[int]
    ) -> None:
        self.runner = runner
        self._factory = factory
        self._n_vocab = n_vocab
        self._widths = widths

    def equal_rows(self, has_time: Callable[[], bool]) -> dict[int, int] | None:
        """Rows by width with the bits of rows alone; None without time."""
        rows = [self._row(i) for i in range(max(self._widths))]
        fed = [[(11 * i + 1) % self._n_vocab] for i in range(len(rows))]
        alone = [self._logits([row], [tokens])[0] for row, tokens in zip(rows, fed, strict=True)]
        equal = {}
        for width in self._widths:
            if not has_time():
                return None
            # From the last row on: places matter as well as numbers.
            indices = range(width)[::-1]
            together = self._logits([rows[i] for i in indices], [fed[i] for i in indices])
            pairs = zip(indices, together, strict=True)
            equal[width] = sum(_same(alone[i], logits) for i, logits in pairs)
        return equal

    def passes(self, has_time: Callable[[], bool]) -> PassBits | None:
        """Bits of drafts and of chunks; None without time."""
        if not has_time():
            return None
        drafts = self._drafts()
        if not has_time():
            return None
        chunks, decoded = self._chunks()
        return PassBits(drafts, chunks, decoded)

    def _row(self, index: int) -> list[Any]:
        n = LENGTHS[index % len(LENGTHS)]
        tokens = [(7 * i + 3 * index) % self._n_vocab for i in range(n)]
        return self._computed(tokens, (), N_LONG if index % len(LENGTHS) == 2 else 0)

    def _computed(self, tokens: list[int], cuts: Sequence[int], n_random: int) -> list[Any]:
        """Caches of a prompt in chunks, after random KV."""
        context = SlotContext(self._factory)
        self._execute(context.caches, tokens[:2])
        if n_random:
            for seed, leaf in enumerate(cache_adapters.leaves(context.caches)):
                cache_adapters.extend_room(leaf, n_random, seed)
            context.evaluate()
        for start, stop in zip((2, *cuts), (*cuts, len(tokens)), strict=True):
            if start < stop:
                self._execute(context.caches, tokens[start:stop])
                context.evaluate()
        return context.caches

    def _execute(self, caches: list[Any], tokens: list[int]) -> mx.array:
        return self.runner.execute([SlotTokens(caches, mx.array(tokens), n_prefill=len(tokens))])

    def _logits(self, rows: Sequence[list[Any]], tokens: Sequence[list[int]]) -> list[mx.array]:
        """Logits of each row's tokens in one pass, which is taken back."""
        starts = [_states(row) for row in rows]
        pairs = zip(rows, tokens, strict=True)
        logits = self.runner.execute([SlotTokens(row, mx.array(fed)) for row, fed in pairs])
        mx.eval(logits)
        for row, states, fed in zip(rows, starts, tokens, strict=True):
            _take_back(row, states, len(fed))
        ends = list(accumulate(map(len, tokens)))
        return [logits[end - len(fed) : end] for end, fed in zip(ends, tokens, strict=True)]

    def _drafts(self) -> bool:
        """Whether several tokens of a row have the bits of single ones."""
        drafting = self._row(0)
        if not all(map(cache_adapters.can_roll_back, cache_adapters.leaves(drafting))):
            return True
        tokens = [(5 * i + 2) % self._n_vocab for i in range(N_DRAFTED)]
        together = self._logits([drafting, self._row(1)], [tokens, tokens[:1]])[0]
        sequence = self._logits([drafting], [tokens])[0]
        singles = []
        for token in tokens:
            singles.append(self.runner.execute([SlotTokens(drafting, mx.array([token]))]))
            mx.eval(singles)
        single = mx.concatenate(singles)
        return _same(together, single) and _same(sequence, single)

    def _chunks(self) -> tuple[bool, bool]:
        """Whether any chunks give the same bits, and single tokens too."""
        tokens = [(3 * i + 5) % self._n_vocab for i in range(N_CHUNKS)]
        whole = self._after(tokens, ())
        chunks = all(_same(whole, self._after(tokens, cuts)) for cuts in CUTS)
        single = range(N_CHUNKS - N_SINGLE, N_CHUNKS)
        return chunks, chunks and _same(whole, self._after(tokens, tuple(single)))

    def _after(self, tokens: list[int], cuts: Sequence[int]) -> mx.array:
        caches = self._computed(tokens, cuts, N_LONG)
        return self._logits([caches], [[1]])[0]

    def costs(
        self, plain: ModelRunner, has_time: Callable[[], bool], *, stops_early: bool
    ) -> Costs:
        """Cost of these passes; `stops_early` at the first high one."""
        decode = 0.0
        for width in (1, max(self._widths)):
            rows = [self._row(i) for i in range(width)]
            step = partial(self._logits, rows, [[1]] * width)
            seconds = self._fastest(plain, has_time, step)
            if seconds is None:
                return Costs()
            decode = max(decode, cost_of(*seconds))
            if stops_early and Costs(decode).is_high:
                return Costs(decode)
        tokens = [(7 * i) % self._n_vocab for i in range(N_TIMED)]
        prefill = self._fastest(plain, has_time, partial(self._computed, tokens, (), 0))
        return Costs(decode, cost_of(*prefill) if prefill else None)

    def _fastest(
        self, plain: ModelRunner, has_time: Callable[[], bool], work: Callable[[], object]
    ) -> tuple[float, float] | None:
        """Fastest seconds of the work by the plain and by this runner."""
        taken: dict[ModelRunner, list[float]] = {plain: [], self.runner: []}
        exact = self.runner
        for _ in range(N_TRIES):
            if not has_time():
                return None
            for runner, seconds in taken.items():
                self.runner = runner
                began = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - began)
        self.runner = exact
        return min(taken[plain]), min(taken[exact])


def _states(caches: list[Any]) -> list[LayerState | None]:
    """States of the layers that cannot be cut, windows included."""
    return [
        cache_adapters.snapshot_state(leaf) if cache_adapters.is_stateful(leaf) else None
        for leaf in cache_adapters.leaves(caches)
    ]


def _take_back(caches: list[Any], states: list[LayerState | None], n_tokens: int) -> None:
    """Take back the last tokens of the caches."""
    for leaf, state in zip(cache_adapters.leaves(caches), states, strict=True):
        if state is None:
            cache_adapters.cut(leaf, n_tokens)
        else:
            cache_adapters.restore_state(leaf, state)


def _same(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays have the same bits."""
    return bool(mx.array_equal(a, b))
