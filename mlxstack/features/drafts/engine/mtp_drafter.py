"""Draft tokens of a head over pairs.

It is the MTP head of a checkpoint, or an EAGLE-3 drafter. The head sees pairs: the last hidden
state of a token, and the token that came next. Pairs come from the passes of the model, so they are
noted where prompts are computed and tokens are chosen. KV from the cache brings no hidden states:
the head's own KV begins where the slot's was computed.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import mlx.core as mx

from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelParts, ModelRunner, SlotTokens, kv_bytes_per_token
from mlxstack.features.drafts.engine.draft_model import DraftModel
from mlxstack.features.drafts.policy.draft_model_governor import DraftModelRecord

NAME = "MTP head"

MAX_BEHIND = 64
"""Pairs that may wait for the next draft; beyond them the head's context starts over."""


class PairHead(Protocol):
    """Head that drafts from pairs, a module of one or more layers."""

    target: ModelParts

    @property
    def parts(self) -> ModelParts:
        """The head as a model of its own, whose tokens are features."""

    def inputs(self, states: mx.array) -> mx.array:
        """States (n, dim) to draft from, of the target's."""

    def features(self, tokens: mx.array, states: mx.array) -> mx.array:
        """Features of tokens (n,) after states (n, dim)."""

    def chosen(self, logits: mx.array, n_vocab: int) -> mx.array:
        """The likeliest tokens (n,) below `n_vocab`."""


class MTPContext:
    """Pairs of a slot, in the head's KV, then in `behind`.

    Pair i is the state of the token at position i of the slot, and the token after it. Pairs are
    consecutive; the first is `start`.
    """

    def __init__(self, cache_factory: CacheFactory, start: int) -> None:
        self.caches: list[Any] = cache_factory.make()
        self.start = start
        self.n_held = 0
        self.behind: list[tuple[mx.array, int]] = []
        self.open: mx.array | None = None
        """The state (1, dim) at `end` while the token after it is not known."""

    @property
    def end(self) -> int:
        """Position of the next pair."""
        return self.start + self.n_held + len(self.behind)

    @property
    def n_bytes(self) -> int:
        """Bytes of the head's KV and of the states that wait."""
        held: int = sum(cache.nbytes for cache in self.caches)
        return held + sum(state.nbytes for state, _ in self.behind)

    def rewind(self, position: int) -> None:
        """Drop the pairs of tokens from `position` on."""
        end = min(self.end, max(self.start, position - 1))
        n_dropped = self.end - end
        n_waiting = min(n_dropped, len(self.behind))
        waiting = self.behind[len(self.behind) - n_waiting :]
        if n_dropped or position <= end:
            is_known = n_waiting == n_dropped > 0 and position > end
            self.open = waiting[0][0] if is_known else None
        del self.behind[len(self.behind) - n_waiting :]
        self.trim(n_dropped - n_waiting)
        self.n_held -= n_dropped - n_waiting

    def add(self, states: mx.array, tokens: Sequence[int]) -> None:
        """Add pairs of states (n, dim) and `n` tokens, which wait."""
        self.behind += zip(mx.split(states, len(tokens)), tokens, strict=True)
        self.open = None

    def note_held(self, n_more: int = 0) -> None:
        """The head has computed the pairs that waited, and `n_more`."""
        self.n_held += len(self.behind) + n_more
        self.behind = []

    def trim(self, n_pairs: int) -> None:
        """Drop the last entries of the head's KV."""
        for cache in self.caches:
            cache.trim(n_pairs)

    def detach(self) -> None:
        """Nothing to do: no step in flight uses its KV."""


class MTPDrafter(DraftModel):
    """Drafts by a head; `check` is that of the model."""

    def __init__(
        self, head: PairHead, check: BatchingCheck, n_vocab: int, name: str = NAME
    ) -> None:
        self._head = head
        self.target = head.target
        runner = ModelRunner(head, rows=check.rows, parts=head.parts)
        self._runner = runner
        self._cache_factory = CacheFactory(head, KVSpec())
        record = DraftModelRecord(measure_widths(runner, self._cache_factory), start_s=0.0)
        super().__init__(name, record, kv_bytes_per_token(runner, self._cache_factory), n_vocab)
        self.bytes_beside = self.bytes_per_token

    def observe(self, taken: RowStep, tokens: Sequence[int]) -> None:
        """Note the states before a row's tokens for the next draft."""
        if self.is_broken or taken.states is None:
            return
        context = taken.row.context
        states = self._head.inputs(taken.states[: len(tokens)])
        fed = [*context.tokens[taken.position :], *taken.row.rolled_back][: len(tokens)]
        pairs = self._ending_at(context, taken.position, fed[0], states)
        pairs.add(states, [*fed[1:], tokens[-1]])
        if len(pairs.behind) > MAX_BEHIND:
            context.companion = None

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """Compute the pairs of a prefill chunk.

        They are states (n, dim) from `start` on, and tokens (n + 1).
        """
        if self.is_broken:
            return
        try:
            states = self._head.inputs(states)
            pairs = self._ending_at(context, start, tokens[0], states)
            features = self._head.features(mx.array(list(tokens[1:])), states)
            if pairs.behind:
                features = mx.concatenate([self._features(pairs), features])
            self._runner.states([SlotTokens(pairs.caches, features)])
            mx.eval([cache.state for cache in pairs.caches])
            pairs.note_held(len(states))
        except Exception as error:  # the target model goes on without drafts
            self.fail(error, [context])

    def _is_ready(self, row: BatchRow) -> bool:
        pairs = row.context.companion
        n_known = len(row.context) + len(row.known)
        return isinstance(pairs, MTPContext) and bool(pairs.behind) and pairs.end == n_known - 1

    def _draft(self, rows: Sequence[BatchRow], n_tokens: int) -> tuple[list[list[int]], list[int]]:
        contexts = [cast(MTPContext, row.context.companion) for row in rows]
        feeds = [self._features(pairs) for pairs in contexts]
        ends = [end - 1 for end in accumulate(len(pairs.behind) for pairs in contexts)]
        widths = [ends[-1] + 1]
        chosen = []
        for n in range(n_tokens):
            plan = [
                SlotTokens(pairs.caches, fed) for pairs, fed in zip(contexts, feeds, strict=True)
            ]
            states = self._runner.states(plan)
            if not n:
                states = states[mx.array(ends)]
                for pairs in contexts:
                    pairs.note_held()
            else:
                widths.append(len(rows))
            logits = self._runner.logits(states)
            chosen.append(self._head.chosen(logits, self._n_vocab))
            feeds = [*mx.split(self._head.features(chosen[-1], states), len(rows))]
        drafts: list[list[int]] = mx.stack(chosen, axis=1).tolist()  # type: ignore[assignment]
        for pairs in contexts:
            # Of the head's own states; the model's replace them once tokens are chosen.
            pairs.trim(n_tokens - 1)
        return drafts, widths

    def _ending_at(
        self, context: SlotContext, position: int, token: int, like: mx.array
    ) -> MTPContext:
        """Pairs of the slot that end at `position`, before `token`.

        They start over after a gap. After a rewind one state is not known any more, and zeros
        stand for it.
        """
        pairs = context.companion
        if isinstance(pairs, MTPContext) and pairs.end == position - 1:
            state = pairs.open
            if state is None:
                state = mx.zeros_like(like[:1])
            pairs.add(state, [token])
        if not isinstance(pairs, MTPContext) or pairs.end != position:
            context.companion = pairs = MTPContext(self._cache_factory, position)
        return pairs

    def _features(self, pairs: MTPContext) -> mx.array:
        """Input of the head for the pairs that wait."""
        states, tokens = zip(*pairs.behind, strict=True)
        return self._head.features(mx.array(list(tokens)), mx.concatenate(list(states)))
