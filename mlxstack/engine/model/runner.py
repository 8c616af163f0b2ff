"""Model runner: forward passes of any tokens of any slots.

Rollback is per slot and per kind of cache. Full attention drops its last tokens, and so does a
sliding window, which holds its tokens in order right after a pass of several. Recurrent state
cannot be cut: the slot goes back to before the pass, and its next pass brings the kept tokens
again.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from msgspec import Struct

from mlxstack.engine.decode.row_views import view
from mlxstack.engine.model import cache_adapters
from mlxstack.policy.draft_governor import PassLayout

MOST_ROWS = 32
"""Maximum tokens computed as rows over a shared prefix, before copying."""


class SlotTokens(Struct, frozen=True):
    """Tokens (n,) of a slot for a forward pass, and its caches."""

    caches: Sequence[Any]
    tokens: mx.array


class ModelRunner:
    """Runs forward passes and counts them; `is_batching` False runs slot by slot.

    `is_ragged` False runs a slot of several tokens apart from the others.
    """

    can_run_ahead = True
    """Whether a pass takes tokens that are not computed yet."""

    def __init__(self, model: Any, *, is_batching: bool = True, is_ragged: bool = True) -> None:
        self.model = model
        self.is_batching = is_batching
        self.is_ragged = is_ragged
        self.n_calls = 0

    def execute(self, plan: Sequence[SlotTokens]) -> mx.array:
        """Logits (all tokens, vocabulary) in the order of the plan, lazily."""
        counts = [slot.tokens.size for slot in plan]
        is_alone = len(plan) == 1 and not self._is_prefixed(plan[0])
        if is_alone or not self.is_batching:
            return _joined([self._alone(slot) for slot in plan])
        if max(counts) == 1:
            return self._rows(plan, counts)
        match self.layout(plan[0].caches):
            case PassLayout.APART:
                return self._apart(plan)
            case PassLayout.PADDED:
                return self._padded(plan, counts)
        return self._rows(plan, counts)

    def layout(self, caches: Sequence[Any]) -> PassLayout:
        """Layout of rows with such caches when one brings several tokens."""
        if not self.is_batching:
            return PassLayout.ALONE
        if not self.is_ragged:
            return PassLayout.APART
        is_recurrent = any(isinstance(leaf, ArraysCache) for leaf in cache_adapters.leaves(caches))
        return PassLayout.PADDED if is_recurrent else PassLayout.RAGGED

    def forward(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens) over these caches."""
        self.n_calls += 1
        logits: mx.array = self.model(tokens, cache=caches)
        return logits

    def hidden_states(self, tokens: mx.array) -> mx.array:
        """States (batch, tokens, dim) of the last layer, without a cache."""
        self.n_calls += 1
        states: mx.array = self.model.model(tokens)
        return states

    def _is_prefixed(self, slot: SlotTokens) -> bool:
        """Whether a lone slot runs by row, to keep its shared prefix."""
        if slot.tokens.size > MOST_ROWS or not cache_adapters.is_prefixed(slot.caches):
            return False
        return slot.tokens.size == 1 or self.layout(slot.caches) is PassLayout.RAGGED

    def _alone(self, slot: SlotTokens) -> mx.array:
        return self.forward(slot.tokens[None], slot.caches)[0]

    def _rows(self, plan: Sequence[SlotTokens], counts: list[int]) -> mx.array:
        """Logits with every token as a row, without padding."""
        tokens = mx.concatenate([slot.tokens for slot in plan])[:, None]
        return self.forward(tokens, _views(plan, counts))[:, -1]

    def _padded(self, plan: Sequence[SlotTokens], counts: list[int]) -> mx.array:
        """A sequence per slot, padded on the right to the longest."""
        longest = max(counts)
        rows = [mx.pad(slot.tokens, (0, longest - slot.tokens.size)) for slot in plan]
        logits = self.forward(mx.stack(rows), _views(plan, counts, is_padded=True))
        return mx.concatenate([logits[i, :n] for i, n in enumerate(counts)])

    def _apart(self, plan: Sequence[SlotTokens]) -> mx.array:
        """Single tokens in one pass, each longer piece in another."""
        single = [i for i, slot in enumerate(plan) if slot.tokens.size == 1]
        logits = {i: self._alone(slot) for i, slot in enumerate(plan) if i not in single}
        if single:
            together = self.execute([plan[i] for i in single])
            logits |= {i: together[at : at + 1] for at, i in enumerate(single)}
        return _joined([logits[i] for i in range(len(plan))])


class PassStart(Struct, frozen=True):
    """Slot before a pass of `n_tokens`, of which some may be dropped."""

    caches: Sequence[Any]
    n_tokens: int
    states: tuple[cache_adapters.LayerState | None, ...]
    """One per layer that cannot be cut; none when all can."""

    @classmethod
    def of(cls, caches: Sequence[Any], n_tokens: int) -> "PassStart":
        """Record the slot's state; immutable arrays are not copied."""
        leaves = list(cache_adapters.leaves(caches))
        is_recurrent = any(isinstance(leaf, ArraysCache) for leaf in leaves)
        states = [cache_adapters.reference_state(leaf) for leaf in leaves] if is_recurrent else []
        return cls(caches, n_tokens, tuple(states))

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


def _views(plan: Sequence[SlotTokens], counts: list[int], is_padded: bool = False) -> list[Any]:
    layers = zip(*(slot.caches for slot in plan), strict=True)
    return [view(caches, counts, is_padded) for caches in layers]


def _joined(logits: list[mx.array]) -> mx.array:
    return mx.concatenate(logits) if len(logits) > 1 else logits[0]
