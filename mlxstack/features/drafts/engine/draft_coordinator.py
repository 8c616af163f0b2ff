"""Proposer of the batch by drafts, from texts or a model.

A draft is fed where tokens per second grow, as measured by the seconds of
passes by width; see `features.drafts.policy`.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlxstack.core.request import Request
from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.drafts.engine.draft_model import DraftModel
from mlxstack.features.drafts.engine.drafter import NO_OFFER, Drafter, DraftSource, drafter_of
from mlxstack.features.drafts.policy.draft_model_governor import DraftPlan
from mlxstack.features.drafts.policy.ngram_draft_governor import (
    DraftOffer,
    StepBounds,
    lead_after,
    observe_passes,
    pass_seconds,
    pass_widths,
    step_seconds,
    widths,
)
from mlxstack.policy.pass_layout import UNMEASURED, PassLayout, WidthCosts
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, draft_bound

DEFAULT_POLICY = PrefillPolicy()


class DraftCoordinator:
    """Drafts for rows that have a `Drafter`.

    The `model` drafts where their texts do not.
    """

    is_active = True

    def __init__(
        self,
        runner: ModelRunner,
        costs: WidthCosts = UNMEASURED,
        model: DraftModel | None = None,
        policy: PrefillPolicy = DEFAULT_POLICY,
    ) -> None:
        self._runner = runner
        self.costs = costs
        """Seconds of the target's passes."""
        self.model = model
        self._policy = policy
        self.needs_states = model is not None and model.target is not None
        self.plain_share = 1.0
        self._drafting_s = 0.0
        """Seconds that the model took for the drafts of the step in flight."""
        self.n_drafts = 0
        self.n_drafted = 0
        self.n_accepted = 0

    @property
    def model_name(self) -> str | None:
        """Name of the draft model, while it drafts."""
        if self.model is None or self.model.is_broken:
            return None
        return self.model.name

    @property
    def counters(self) -> Mapping[str, int]:
        """Drafts of all rows, and those of the model among them."""
        counters = {
            "n_drafts": self.n_drafts,
            "n_drafted_tokens": self.n_drafted,
            "n_accepted_tokens": self.n_accepted,
        }
        if self.model is not None:
            counters["n_model_drafted_tokens"] = self.model.n_drafted
            counters["n_model_accepted_tokens"] = self.model.n_accepted
        return counters

    def start(self, request: Request, text: Sequence[int]) -> Drafter:
        """Drafter over prompt and prediction."""
        return Drafter(text, request.eos, request.prediction)

    def propose(
        self, rows: Sequence[BatchRow], *, is_prefilling: bool
    ) -> list[tuple[BatchRow, Exception]]:
        """As `Proposer.propose`."""
        began = time.perf_counter()
        broken: list[tuple[BatchRow, Exception]] = []
        drafted: list[BatchRow] = []
        offers: list[DraftOffer] = []
        for row in rows:
            try:
                offers.append(_offer(row))
                drafted.append(row)
            except Exception as error:
                broken.append((row, error))
        modeled = self._draft_by_model(drafted, offers, is_prefilling)
        counts = self._widths(drafted, offers, is_prefilling)
        for i, row in enumerate(drafted):
            drafter = drafter_of(row)
            if drafter is not None:
                row.proposed = drafter.take(modeled.get(i, counts[i]))
        self._drafting_s = 0.0
        if any(map(_is_modeled, drafted)):
            self._drafting_s = time.perf_counter() - began
        return broken

    def expects(self, rows: Sequence[BatchRow]) -> bool:
        """As `Proposer.expects`."""
        offers = [_expected_offer(row) for row in rows]
        if any(self._widths(rows, offers, is_prefilling=False)):
            return True
        return bool(self._model_widths(rows, offers, is_prefilling=False))

    def settle(
        self,
        step: Sequence[RowStep],
        outcomes: Sequence[Sequence[int] | None],
        seconds: float | None,
    ) -> None:
        """As `Proposer.settle`."""
        modeled = [i for i, taken in enumerate(step) if _is_modeled(taken.row)]
        passes = self._passes(step)
        taken_s, plain_s = self._expected_seconds(step, passes)
        self.plain_share = plain_s / taken_s
        for taken, tokens in zip(step, outcomes, strict=True):
            if tokens is not None:
                self._settle_row(taken, tokens, taken_s, plain_s)
        if seconds is not None and passes:
            self.costs = observe_passes(self.costs, passes, seconds - self._drafting_s)
            self._settle_model(step, outcomes, modeled, seconds)

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """As `Proposer.observe_prefill`."""
        if self.model is not None:
            self.model.observe_prefill(context, start, states, tokens)

    def late_row(
        self, rows: Sequence[BatchRow], has_room: Callable[[int], bool]
    ) -> BatchRow | None:
        """Row whose context of the model is to be computed further."""
        if self.model is None:
            return None
        return self.model.late_row(rows, self.costs, has_room)

    def catch_up(self, row: BatchRow, seconds: float) -> None:
        """Compute a chunk of the row's context of the model."""
        assert self.model is not None
        self.model.catch_up(row, seconds, self.costs)

    def _draft_by_model(
        self, rows: Sequence[BatchRow], offers: list[DraftOffer], is_prefilling: bool
    ) -> dict[int, int]:
        """Draft by the model; the number of its tokens by row.

        They are known tokens when the offers of other rows are weighed.
        """
        counts = self._model_widths(rows, offers, is_prefilling)
        if self.model is None or not counts:
            return {}
        drafts = self.model.draft([rows[i] for i in counts], list(counts.values()))
        drafted: dict[int, int] = {}
        rate = self.model.record.rate
        for i, tokens in zip(counts, drafts, strict=True):
            drafter = drafter_of(rows[i])
            assert drafter is not None
            drafted[i] = drafter.use_model(tokens, rate)
            offers[i] = DraftOffer(rate=rate, n_known=1 + drafted[i])
        return drafted

    def _model_widths(
        self, rows: Sequence[BatchRow], offers: Sequence[DraftOffer], is_prefilling: bool
    ) -> dict[int, int]:
        """Draft model tokens for rows without another draft."""
        if self.model is None or not rows:
            return {}
        free = {i: rows[i] for i, offer in enumerate(offers) if not offer.n_tokens}
        layout = self._layout(rows[0])
        bounds = self._bounds(rows, layout, is_prefilling)
        counts = [offer.n_known for offer in offers]
        return self.model.plan(free, DraftPlan(counts, self.costs, layout, bounds))

    def _widths(
        self, rows: Sequence[BatchRow], offers: Sequence[DraftOffer], is_prefilling: bool
    ) -> list[int]:
        """Offered tokens that each row brings."""
        if not any(offer.n_tokens for offer in offers):
            return [0] * len(offers)
        layout = self._layout(rows[0])
        return widths(offers, self.costs, layout, self._bounds(rows, layout, is_prefilling))

    def _bounds(
        self, rows: Sequence[BatchRow], layout: PassLayout, is_prefilling: bool
    ) -> StepBounds:
        plain_s = step_seconds([1] * len(rows), self.costs, layout)
        most_s = draft_bound(plain_s, len(rows), self._policy, is_prefilling=is_prefilling)
        return StepBounds(most_s, tuple(map(_lead_s, rows)))

    def _layout(self, row: BatchRow) -> PassLayout:
        return self._runner.layout(row.context.own_caches)

    def _passes(self, step: Sequence[RowStep]) -> list[int]:
        """Widths of the passes of a step, if rows have drafters."""
        if any(drafter_of(taken.row) is not None for taken in step):
            return pass_widths([taken.n_fed for taken in step], self._layout(step[0].row))
        return []

    def _expected_seconds(
        self, step: Sequence[RowStep], passes: Sequence[int]
    ) -> tuple[float, float]:
        """Expected seconds of a step, and of one without drafts.

        Where no row drafts they are not known, but equal.
        """
        if not passes:
            return 1.0, 1.0
        layout = self._layout(step[0].row)
        taken_s = self._drafting_s + pass_seconds(passes, self.costs)
        return taken_s, step_seconds([1] * len(step), self.costs, layout)

    def _settle_row(
        self, taken: RowStep, tokens: Sequence[int], taken_s: float, plain_s: float
    ) -> None:
        row = taken.row
        n_accepted = max(0, len(tokens) - 1)
        if row.proposed:
            self.n_drafts += 1
            self.n_drafted += len(row.proposed)
            self.n_accepted += n_accepted
        drafter = drafter_of(row)
        if drafter is not None:
            drafter.lead_s = lead_after(drafter.lead_s, n_accepted, taken_s, plain_s)
            if tokens:
                drafter.settle(tokens, len(row.proposed))
        if row.context.companion is not None:
            row.context.companion.rewind(len(row.context) + len(row.rolled_back))
        if self.model is not None and tokens:
            self.model.observe(taken, tokens)

    def _settle_model(
        self,
        step: Sequence[RowStep],
        outcomes: Sequence[Sequence[int] | None],
        modeled: Sequence[int],
        seconds: float,
    ) -> None:
        """Let the model learn from a step with drafts for these rows."""
        if self.model is None:
            return
        counts = [1 + len(taken.row.proposed) for taken in step]
        n_drafted = 0
        n_accepted = 0
        for i in modeled:
            n_drafted += counts[i] - 1
            n_accepted += len(outcomes[i] or ()) - 1
            counts[i] = 1
        plan = DraftPlan(counts, self.costs, self._layout(step[0].row))
        self.model.settle(n_drafted, n_accepted, seconds, plan)


def _offer(row: BatchRow) -> DraftOffer:
    """Prepare a draft of the row; none after a rollback."""
    if row.rolled_back:
        return DraftOffer(n_known=len(row.rolled_back) + 1)
    drafter = drafter_of(row)
    if drafter is None:
        return NO_OFFER
    return drafter.propose(row.sampler.forced_tokens(), row.max_proposed)


def _expected_offer(row: BatchRow) -> DraftOffer:
    """Draft that may be possible once the token in flight is known."""
    drafter = drafter_of(row)
    if drafter is None:
        return NO_OFFER
    return drafter.expected(row.sampler.is_ruled)


def _lead_s(row: BatchRow) -> float:
    drafter = drafter_of(row)
    return 0.0 if drafter is None else drafter.lead_s


def _is_modeled(row: BatchRow) -> bool:
    """Whether the row has a draft of the model in this step."""
    drafter = drafter_of(row)
    return bool(row.proposed) and drafter is not None and drafter.source is DraftSource.MODEL
