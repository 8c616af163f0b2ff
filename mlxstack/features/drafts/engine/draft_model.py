"""Draft tokens of a model beside the target.

Several rows are drafted for at once. Drafting is greedy and knows no rules of the rows: the
target's sampler verifies every token.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.runner import ModelParts
from mlxstack.features.drafts.engine.drafter import drafter_of
from mlxstack.features.drafts.policy import draft_model_governor as governor
from mlxstack.features.drafts.policy.draft_model_governor import DraftModelRecord, DraftPlan
from mlxstack.features.drafts.policy.ngram_draft_governor import observe_passes
from mlxstack.policy.pass_layout import WidthCosts

log = logging.getLogger(__name__)


class DraftModel:
    """Drafts for rows of the batch, on the MLX thread.

    Tokens from `n_vocab` on are not the target's.
    """

    target: ModelParts | None = None
    """The target model in parts, where drafts need its hidden states, which no chunk brings."""

    bytes_beside = 0
    """Bytes that it adds to every token's KV."""

    placeholder = 0
    """Token in place of each feature of an image."""

    def __init__(
        self, name: str, record: DraftModelRecord, bytes_per_token: int, n_vocab: int
    ) -> None:
        self.name = name
        self.record = record
        self.bytes_per_token = bytes_per_token
        self._n_vocab = n_vocab
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
        raise NotImplementedError

    def _is_ready(self, row: BatchRow) -> bool:
        """Whether the context of the row is long enough."""
        raise NotImplementedError

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
        return None

    def catch_up(self, row: BatchRow, seconds: float, costs: WidthCosts) -> None:
        """Compute the next chunk of a row's draft context."""

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


def ends_of(tokens: Sequence[Sequence[int]]) -> list[int]:
    """The last line of each row in logits of all their tokens."""
    return [end - 1 for end in accumulate(map(len, tokens))]
