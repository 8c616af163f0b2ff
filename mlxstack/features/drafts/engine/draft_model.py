"""Draft tokens of a small model, for several rows at once.

Each slot has a second context, of the draft model, in `SlotContext.companion`: a beginning of what
the slot holds. It is cut and dropped with the slot's own, and computed in chunks between two steps.
Drafting is greedy and knows no rules of the rows: the target's sampler verifies every token.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelParts, ModelRunner, SlotTokens, kv_bytes_per_token
from mlxstack.features.drafts.engine.drafter import drafter_of
from mlxstack.features.drafts.policy import draft_model_governor as governor
from mlxstack.features.drafts.policy.draft_model_governor import DraftPlan
from mlxstack.features.drafts.policy.ngram_draft_governor import observe_passes
from mlxstack.policy.pass_layout import WidthCosts

log = logging.getLogger(__name__)

MAX_LACKING = 16
"""Tokens that the draft model may lack of a row it drafts for; more are computed in chunks."""

MAX_CHUNK = 512
"""Tokens of such a chunk."""

RESERVE = 512
"""Tokens for which room is made beside those that are known: the beginning of an answer."""


class DraftModel:
    """Draft model for rows of the batch, on the MLX thread.

    Tokens from `n_vocab` on are not the target's.
    """

    target: ModelParts | None = None
    """The target model in parts, where drafts need its hidden states, which no chunk brings."""

    bytes_beside = 0
    """Bytes that it adds to every token's KV."""

    placeholder = 0
    """Token in place of each feature of an image."""

    def __init__(
        self, name: str, runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int
    ) -> None:
        self.name = name
        self._runner = runner
        self._cache_factory = cache_factory
        self._n_vocab = n_vocab
        self.record = governor.DraftModelRecord(measure_widths(runner, cache_factory))
        self.bytes_per_token = kv_bytes_per_token(runner, cache_factory)
        self.is_broken = False
        self.n_drafted = 0
        self.n_accepted = 0

    def plan(self, rows: Mapping[int, BatchRow], plan: DraftPlan) -> dict[int, int]:
        """Tokens to draft for the rows with a ready context."""
        if self.is_broken:
            return {}
        rates: dict[int, float] = {}
        for i, row in rows.items():
            drafter = drafter_of(row)
            if drafter is not None and row.max_proposed > 0 and self._is_ready(row):
                rates[i] = drafter.model_rate or self.record.rate
        counts = governor.plan_drafts(self.record, rates, plan)
        return {i: min(n, rows[i].max_proposed) for i, n in counts.items()}

    def draft(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> list[list[int]]:
        """Greedy draft tokens for each row; none after an exception."""
        try:
            began = time.perf_counter()
            drafts, widths = self._draft(rows, max(counts))
            costs = observe_passes(self.record.costs, widths, time.perf_counter() - began)
            self.record = replace(self.record, costs=costs)
            return [tokens[:n] for tokens, n in zip(drafts, counts, strict=True)]
        except Exception as error:  # the target model goes on without drafts
            self.fail(error, [row.context for row in rows])
            return [[] for _ in rows]

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
                logits = logits[mx.array(_ends(behind))]
                self._hold(contexts, behind)
            chosen.append(mx.argmax(logits[:, : self._n_vocab], axis=-1))
            feeds = [chosen[-1][i : i + 1] for i in range(len(rows))]
        drafts: list[list[int]] = mx.stack(chosen, axis=1).tolist()  # type: ignore[assignment]
        for context, tokens in zip(contexts, drafts, strict=True):
            context.extend(tokens[:-1])
        return drafts, widths

    def settle(self, n_drafted: int, n_accepted: int, seconds: float, plan: DraftPlan) -> None:
        """Learn the acceptance of a step's drafts, of `seconds` in all."""
        plain_s = plan.seconds(plan.counts)
        if n_drafted:
            self.n_drafted += n_drafted
            self.n_accepted += n_accepted
            outcome = n_drafted, n_accepted, seconds - plain_s, plain_s, len(plan.counts)
            self.record = governor.settled(self.record, *outcome)
        self.record = governor.stepped(self.record, seconds, plain_s)

    def observe(self, taken: RowStep, tokens: Sequence[int]) -> None:
        """Note the tokens of a row, where drafts need its hidden states."""

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """Note a prefill chunk, where drafts need its hidden states."""

    def late_row(
        self, rows: Sequence[BatchRow], costs: WidthCosts, has_room: Callable[[int], bool]
    ) -> BatchRow | None:
        """Row whose draft context is to be computed further, if any."""
        late = [row for row in rows if drafter_of(row) is not None and _n_behind(row) > MAX_LACKING]
        if self.is_broken or self.target is not None or not late:
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

    def fail(self, error: Exception, contexts: Sequence[SlotContext]) -> None:
        """Stop drafting for good; no request fails for it. Raises DeviceError."""
        raise_device_error(error)
        log.error("draft model %s disabled: %s", self.name, error, exc_info=error)
        self.is_broken = True
        for context in contexts:
            context.companion = None

    def _text(self, tokens: list[int]) -> list[int]:
        """Tokens that the draft model has: virtual ids and others are replaced."""
        return [token if token < self._n_vocab else self.placeholder for token in tokens]

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


def _ends(tokens: Sequence[Sequence[int]]) -> list[int]:
    """The last line of each row in logits of all their tokens."""
    return [end - 1 for end in accumulate(map(len, tokens))]
