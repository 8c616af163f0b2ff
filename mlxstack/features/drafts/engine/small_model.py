"""Draft tokens of a small model.

Its context in each slot hangs on the slot's own in `SlotContext.companion`: a beginning of what the
slot holds. It is cut and dropped with the slot's own, and computed in chunks between two steps.
"""

import time
from collections.abc import Callable, Sequence
from math import inf

import mlx.core as mx

from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens, kv_bytes_per_token
from mlxstack.features.drafts.engine.draft_model import DraftModel, ends_of
from mlxstack.features.drafts.engine.drafter import drafter_of
from mlxstack.features.drafts.policy import draft_model_governor as governor
from mlxstack.features.drafts.policy.draft_model_governor import DraftModelRecord
from mlxstack.policy.pass_layout import WidthCosts

MAX_LACKING = 16
"""Tokens that the draft model may lack of a row it drafts for; more are computed in chunks."""

MAX_CHUNK = 512
"""Tokens of such a chunk."""

RESERVE = 512
"""Tokens for which room is made beside those that are known: the beginning of an answer."""


class SmallModel(DraftModel):
    """Model of the target's vocabulary that drafts token by token."""

    def __init__(
        self, name: str, runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int
    ) -> None:
        self._runner = runner
        self._cache_factory = cache_factory
        record = DraftModelRecord(measure_widths(runner, cache_factory))
        super().__init__(name, record, kv_bytes_per_token(runner, cache_factory), n_vocab)

    def _draft(self, rows: Sequence[BatchRow], n_tokens: int) -> tuple[list[list[int]], list[int]]:
        """Draft tokens of each row, and widths of the passes."""
        contexts = [self._context(row) for row in rows]
        behind = [self._text(_behind(row)) for row in rows]
        feeds = [mx.array(tokens) for tokens in behind]
        widths = [sum(map(len, behind))]
        chosen = []
        for n in range(n_tokens):
            if n:
                widths.append(len(rows))
            pairs = zip(contexts, feeds, strict=True)
            logits = self._runner.execute([SlotTokens(c.caches, fed) for c, fed in pairs])
            if not n:
                logits = logits[mx.array(ends_of(behind))]
                self._hold(contexts, behind)
            chosen.append(mx.argmax(logits[:, : self._n_vocab], axis=-1))
            feeds = [chosen[-1][i : i + 1] for i in range(len(rows))]
        drafts: list[list[int]] = mx.stack(chosen, axis=1).tolist()  # type: ignore[assignment]
        for context, tokens in zip(contexts, drafts, strict=True):
            context.extend(tokens[:-1])
        return drafts, widths

    def late_row(
        self, rows: Sequence[BatchRow], costs: WidthCosts, has_room: Callable[[int], bool]
    ) -> BatchRow | None:
        """Row whose draft context is to be computed further, if any."""
        late = [row for row in rows if drafter_of(row) is not None and _n_behind(row) > MAX_LACKING]
        if self.is_broken or not late:
            return None
        row = min(late, key=_n_behind)
        n_bytes = self.bytes_per_token * (_n_behind(row) + RESERVE)
        if self._seconds(row, costs) > 0 and has_room(n_bytes):
            return row
        return None

    def catch_up(self, row: BatchRow, seconds: float, costs: WidthCosts) -> None:
        """Compute the next chunk of a row's draft context."""
        began = time.perf_counter()
        allowed = self._seconds(row, costs)
        n_tokens = governor.tokens_within(self.record.costs, min(seconds, allowed), MAX_CHUNK)
        context = self._context(row)
        tokens = self._text(_behind(row)[:-1][:n_tokens])
        try:
            context.reserve(len(row.context) + RESERVE)
            self._runner.execute([SlotTokens(context.caches, mx.array(tokens))])
            context.evaluate()
            context.extend(tokens)
        except Exception as error:  # as above
            self.fail(error, [row.context])
        if allowed < inf:
            self.record = governor.charged(self.record, time.perf_counter() - began)

    def _is_ready(self, row: BatchRow) -> bool:
        return _n_behind(row) <= MAX_LACKING

    def _context(self, row: BatchRow) -> SlotContext:
        draft = _context_of(row)
        if draft is None:
            row.context.companion = draft = SlotContext(self._cache_factory)
        return draft

    def _hold(self, contexts: Sequence[SlotContext], behind: Sequence[Sequence[int]]) -> None:
        """Mark the known tokens as computed, before refusable ones."""
        for context, tokens in zip(contexts, behind, strict=True):
            context.extend(tokens)
            context.checkpoint()

    def _seconds(self, row: BatchRow, costs: WidthCosts) -> float:
        return governor.prefill_seconds(self.record, _n_behind(row), row.n_left, costs)


def _behind(row: BatchRow) -> list[int]:
    """The known tokens that the row's context of the draft model lacks."""
    n_held = _n_held(row)
    return [*row.context.tokens[n_held:], *row.known[max(0, n_held - len(row.context)) :]]


def _n_behind(row: BatchRow) -> int:
    return len(row.context) + len(row.known) - _n_held(row)


def _n_held(row: BatchRow) -> int:
    draft = _context_of(row)
    return 0 if draft is None else len(draft)


def _context_of(row: BatchRow) -> SlotContext | None:
    """The row's context of the draft model."""
    draft = row.context.companion
    return draft if isinstance(draft, SlotContext) else None
