"""Model runner: forward passes of any tokens of any slots.

Rollback is per slot and per kind of cache. Full attention drops its last tokens, and so does a
sliding window, which holds its tokens in order right after a pass of several. Recurrent state
cannot be cut: the slot goes back to before the pass, and its next pass brings the kept tokens
again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cpu_attention import joined
from mlxstack.engine.model.length_rope import pass_length
from mlxstack.engine.model.pass_mode import PassMode, using_mode
from mlxstack.engine.model.row_modules import split_attention
from mlxstack.engine.model.row_views import (
    ExtraPairs,
    KVView,
    PaddedKVView,
    PromptView,
    RowCaches,
    ViewKind,
    masked,
    shifted,
    view,
)
from mlxstack.policy.pass_layout import PassLayout, RowMode

N_FILLED = (2, 256)
"""Tokens of the passes of `fill`; the second is for blocks of pooled keys."""


def zeros(n: int) -> mx.array:
    """Tokens (n,) to measure passes with."""
    return mx.zeros((n,), mx.int32)


class EmbeddedChunk(Struct, frozen=True):
    """Embeddings and positions of a chunk, in place of its tokens' own."""

    embeddings: mx.array
    """(n, dim)"""
    positions: mx.array | None = None
    """(3, n); None where they are indices."""
    added: tuple[mx.array, ...] = ()
    """Arrays (n, dim), the i-th of which is added to the output of layer i."""
    together: ExtraPairs | None = None
    """Pairs of tokens that attend to each other beside those that the mask allows."""


class SlotTokens(Struct, frozen=True):
    """Tokens of a slot for a forward pass."""

    caches: Sequence[Any]
    tokens: mx.array
    """(n,), or features (n, dims) for a model that takes these."""
    shift: int = 0
    """Position minus index of each, but where `embedded` has positions."""
    embedded: EmbeddedChunk | None = None
    n_prefill: int = 0
    """Tokens of the prompt before the last one; 0 for tokens that are decoded."""

    @property
    def n_tokens(self) -> int:
        """Number of the tokens."""
        return self.tokens.shape[0]


Compute = Callable[..., mx.array]
"""Output (B, T, dims) of tokens (B, T) over caches, from embeddings (B, T, dim) if given."""


class ModelParts(Struct, frozen=True):
    """A model in parts."""

    trunk: Callable[..., mx.array]
    """Last hidden states (B, T, dim) of tokens (B, T)."""
    head: Callable[[mx.array], mx.array]
    """Logits of such states."""
    embed: Callable[[mx.array], mx.array]
    """Embeddings (n, dim) of tokens (n,)."""
    example: Callable[[int], mx.array] = zeros
    """Input of `n` tokens, to measure passes with."""


class ModelRunner:
    """Runs forward passes and counts them.

    Slots go together as `rows` says. `parts` are those of a model whose hidden states are needed.
    """

    can_run_ahead = True
    """Whether a pass takes tokens that are not computed yet."""

    def __init__(
        self, model: Any, rows: RowMode = RowMode.RAGGED, parts: ModelParts | None = None
    ) -> None:
        self.model = model
        self.parts = parts
        self.example = parts.example if parts else zeros
        self.rows = rows
        self.n_calls = 0
        self.mode: PassMode | None = None
        """How layers multiply and attend; None: the usual way."""
        self._pass_length = pass_length(model)
        self._single: ViewKind = KVView
        if rows is RowMode.ATTENTION_BY_ROW:
            split_attention(model)
            self._single = RowCaches

    def execute(self, plan: Sequence[SlotTokens], views: Sequence[Any] | None = None) -> mx.array:
        """Logits (all tokens, vocabulary) in the order of the plan, lazily.

        `views` of grouped rows replace the caches of a plan of single tokens.
        """
        return self._run(plan, self.forward, views)

    def states(self, plan: Sequence[SlotTokens], views: Sequence[Any] | None = None) -> mx.array:
        """Last hidden states (all tokens, dim), as `execute`."""
        assert self.parts is not None
        trunk = self.parts.trunk

        def compute(tokens: mx.array, caches: Sequence[Any], **more: mx.array) -> mx.array:
            self.n_calls += 1
            return trunk(tokens, caches, **more)

        return self._run(plan, compute, views)

    def logits(self, states: mx.array) -> mx.array:
        """Logits (tokens, vocabulary) of last hidden states (tokens, dim)."""
        assert self.parts is not None
        with using_mode(self.mode):
            return self.parts.head(states)

    def _run(
        self, plan: Sequence[SlotTokens], compute: Compute, views: Sequence[Any] | None = None
    ) -> mx.array:
        """Output (all tokens, dims) in the order of the plan."""
        max_rows = self.mode.max_rows if self.mode else 0
        with using_mode(self.mode):
            if not max_rows or views is not None:
                return self._pass(plan, compute, views)
            return joined([self._pass(part, compute) for part in parts_of(plan, max_rows)])

    def _pass(
        self, plan: Sequence[SlotTokens], compute: Compute, views: Sequence[Any] | None = None
    ) -> mx.array:
        """Output of the plan in one pass where possible."""
        counts = [slot.n_tokens for slot in plan]
        if views is not None:
            return _rows(plan, views, compute)
        if len(plan) == 1 or self.rows is RowMode.ALONE:
            return joined([self._alone(slot, compute) for slot in plan])
        if max(counts) == 1:
            return _rows(plan, _views(plan, counts, self._single), compute)
        return self._uneven(plan, counts, compute)

    def _uneven(self, plan: Sequence[SlotTokens], counts: list[int], compute: Compute) -> mx.array:
        """Output of slots that bring several tokens."""
        layout = self.layout(plan[0].caches)
        if all(slot.n_prefill for slot in plan):
            return self._prompts(plan, layout, compute)
        match layout:
            case PassLayout.APART:
                return self._apart(plan, compute)
            case PassLayout.PADDED:
                return _padded(plan, counts, compute)
        return _rows(plan, _views(plan, counts), compute)

    def layout(self, caches: Sequence[Any]) -> PassLayout:
        """Layout of rows with such caches when one brings several tokens."""
        if self.rows is RowMode.ALONE:
            return PassLayout.ALONE
        if self.rows is not RowMode.RAGGED:
            return PassLayout.APART
        is_recurrent = any(isinstance(leaf, ArraysCache) for leaf in cache_adapters.leaves(caches))
        if is_recurrent:
            return PassLayout.PADDED
        return PassLayout.RAGGED

    def forward(self, tokens: mx.array, caches: Sequence[Any], **more: mx.array) -> mx.array:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens) over these caches."""
        self.n_calls += 1
        logits: mx.array = self.model(tokens, cache=caches, **more)
        return logits

    def _alone(self, slot: SlotTokens, compute: Compute) -> mx.array:
        self._pass_length.n_prefill = slot.n_prefill
        try:
            return _alone(slot, compute)
        finally:
            self._pass_length.n_prefill = 0

    def _prompts(
        self, plan: Sequence[SlotTokens], layout: PassLayout, compute: Compute
    ) -> mx.array:
        """Chunks of prompts, in one pass where they can be."""
        counts = [slot.n_tokens for slot in plan]
        if layout is PassLayout.RAGGED:
            return _rows(plan, _views(plan, counts, PromptView), compute)
        if layout is PassLayout.PADDED:
            return _padded(plan, counts, compute)
        return joined([self._alone(slot, compute) for slot in plan])

    def _apart(self, plan: Sequence[SlotTokens], compute: Compute) -> mx.array:
        """Single tokens in one pass, each longer piece in another."""
        single = [i for i, slot in enumerate(plan) if slot.n_tokens == 1]
        outputs = {i: self._alone(slot, compute) for i, slot in enumerate(plan) if i not in single}
        if single:
            together = self._run([plan[i] for i in single], compute)
            outputs |= {i: together[position : position + 1] for position, i in enumerate(single)}
        return joined([outputs[i] for i in range(len(plan))])


def parts_of(plan: Sequence[SlotTokens], max_rows: int) -> list[list[SlotTokens]]:
    """Cut a plan into passes of `max_rows` tokens, but for prompts."""
    passes: list[list[SlotTokens]] = []
    n_free = 0
    for slot in plan:
        if slot.n_prefill or slot.embedded is not None:
            passes.append([slot])
            n_free = 0
            continue
        start = 0
        while start < slot.n_tokens:
            if not n_free:
                passes.append([])
                n_free = max_rows
            stop = min(start + n_free, slot.n_tokens)
            passes[-1].append(replace(slot, tokens=slot.tokens[start:stop]))
            n_free -= stop - start
            start = stop
    return passes


class PassStart(Struct, frozen=True):
    """Slot before a pass of which tokens may be dropped."""

    caches: Sequence[Any]
    n_tokens: int
    """Tokens of the pass."""
    states: tuple[cache_adapters.LayerState | None, ...]
    """One per layer that cannot be cut; none when all can."""

    @classmethod
    def of(cls, caches: Sequence[Any], n_tokens: int) -> "PassStart":
        """Record the slot's state; immutable arrays are not copied."""
        leaves = list(cache_adapters.leaves(caches))
        is_recurrent = any(isinstance(leaf, ArraysCache) for leaf in leaves)
        if not is_recurrent:
            return cls(caches, n_tokens, ())
        return cls(caches, n_tokens, tuple(map(cache_adapters.reference_state, leaves)))

    def roll_back(self, n_kept: int) -> int:
        """Keep the first `n_kept` tokens of the pass; returns those left.

        At least one is kept.
        """
        if n_kept == self.n_tokens:
            return n_kept
        leaves = list(cache_adapters.leaves(self.caches))
        if not self.states:
            for leaf in leaves:
                cache_adapters.cut(leaf, self.n_tokens - n_kept)
            return n_kept
        for leaf, state in zip(leaves, self.states, strict=True):
            if state is None:
                cache_adapters.cut(leaf, self.n_tokens)
            else:
                cache_adapters.restore_state(leaf, state)
        return 0


def _views(plan: Sequence[SlotTokens], counts: list[int], kind: ViewKind = KVView) -> list[Any]:
    layers = zip(*(slot.caches for slot in plan), strict=True)
    shifts = [slot.shift for slot in plan]
    return [view(caches, counts, kind, shifts) for caches in layers]


def _alone(slot: SlotTokens, compute: Compute) -> mx.array:
    caches = slot.caches
    embedded = slot.embedded
    if embedded is None:
        if slot.shift:
            caches = [shifted(cache, slot.shift) for cache in caches]
        return compute(slot.tokens[None], caches)[0]
    if embedded.positions is not None:
        added = [*embedded.added, *[None] * len(caches)]
        pairs = zip(caches, added, strict=False)
        caches = [shifted(cache, embedded.positions, more) for cache, more in pairs]
    elif embedded.together is not None:
        caches = [masked(cache, embedded.together) for cache in caches]
    return compute(slot.tokens[None], caches, input_embeddings=embedded.embeddings[None])[0]


def _rows(plan: Sequence[SlotTokens], views: Sequence[Any], compute: Compute) -> mx.array:
    """Every token as a row, without padding."""
    tokens = mx.concatenate([slot.tokens for slot in plan])[:, None]
    return compute(tokens, views)[:, -1]


def _padded(plan: Sequence[SlotTokens], counts: list[int], compute: Compute) -> mx.array:
    """A sequence per slot, padded on the right to the longest."""
    longest = max(counts)
    rows = [mx.pad(slot.tokens, (0, longest - slot.n_tokens)) for slot in plan]
    outputs = compute(mx.stack(rows), _views(plan, counts, PaddedKVView))
    return mx.concatenate([outputs[i, :n] for i, n in enumerate(counts)])


def fill(runner: ModelRunner, make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Caches in which no full layer is empty.

    Sparse layers may keep keys of pooled blocks alone, and none before the first is complete.
    """
    for n_tokens in N_FILLED:
        caches = make()
        runner.execute([SlotTokens(caches, runner.example(n_tokens))])
        sliceable = filter(cache_adapters.is_sliceable, cache_adapters.leaves(caches))
        if not any(leaf.empty() for leaf in sliceable):
            break
    return caches


def kv_bytes_per_token(runner: ModelRunner, cache_factory: cache_adapters.CacheFactory) -> int:
    """Bytes that one token adds to the layers that keep every token."""
    caches = fill(runner, partial(cache_factory.make, cache_factory.quantized_start))
    leaves = [leaf for leaf in cache_adapters.leaves(caches) if cache_adapters.is_sliceable(leaf)]
    return sum(part.nbytes for leaf in leaves for part in cache_adapters.span(leaf, 0, 1))
