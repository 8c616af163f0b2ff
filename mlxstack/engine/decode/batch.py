"""Batched decoding of the running slots, with drafts.

The next step is built before the last one is read, but for rows whose tokens may be drafted.
"""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.engine_events import TokenSampled
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.draft_model import DraftModel
from mlxstack.engine.decode.drafter import DraftSource
from mlxstack.engine.decode.mtp_drafter import MTPDrafter
from mlxstack.engine.decode.row_stack import RowStacker
from mlxstack.engine.decode.sampler import Choice, sample_rows
from mlxstack.engine.device import has_gpu
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.engine.vision.encoder import ImageEncoder
from mlxstack.policy.drafts.draft_model_governor import DraftPlan
from mlxstack.policy.drafts.ngram_draft_governor import (
    UNMEASURED,
    DraftOffer,
    PassLayout,
    StepBounds,
    WidthCosts,
    lead_after,
    observe_passes,
    pass_seconds,
    pass_widths,
    step_seconds,
    widths,
)
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, draft_bound

DEFAULT_POLICY = PrefillPolicy()


class InFlightStep(Struct, frozen=True):
    """A built step that was not read yet, by rows.

    A row without choices has rules that raised after the model had run; drafts are in the rows.
    `positions` are those of the token before the first choice, and `states` the hidden states
    (1 + draft, dim) from there on. `passes` are widths, none where no row drafts. The draft model
    took `drafting_s` seconds, for the rows at `modeled`.
    """

    rows: Sequence[BatchRow]
    choices: Sequence[tuple[Choice, ...]]
    positions: Sequence[int]
    states: Sequence[mx.array | None]
    passes: Sequence[int]
    modeled: frozenset[int] = frozenset()
    drafting_s: float = 0.0


class Batch:
    """The running rows. Joining and leaving touch no other row's arrays.

    With `is_ahead` the graph of a step is built while the last one is computed. A GPU gets it at
    once, which keeps it busy; on a CPU MLX computes most of a step before submitting it returns,
    so there the last tokens are returned first. Drafts and prefill chunks need the last tokens:
    nothing is built ahead of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        costs: WidthCosts = UNMEASURED,
        draft_model: DraftModel | None = None,
        policy: PrefillPolicy = DEFAULT_POLICY,
        stacker: RowStacker | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self.runner = runner
        self.images = images
        self._stacker = stacker
        self._policy = policy
        self._is_prefilling = False
        self.plain_share = 1.0
        """Share of the seconds of the last step that was read which it takes without drafts."""
        self.in_flight: InFlightStep | None = None
        self._unsubmitted: list[mx.array] = []
        """Arrays of the step in flight, until MLX has been told to compute them."""
        self.rows: list[BatchRow] = []
        self._broken: list[tuple[BatchRow, Exception]] = []
        self.is_ahead = runner.can_run_ahead
        self.costs = costs
        self.draft_model = draft_model
        if draft_model is not None and images is not None:
            draft_model.placeholder = images.image_model.placeholder
        self.n_calls = 0
        self.n_rows = 0
        self.n_drafts = 0
        self.n_drafted = 0
        self.n_accepted = 0

    @property
    def is_busy(self) -> bool:
        """Whether there is a row to feed or a step to read."""
        return bool(self.rows or self.in_flight)

    def join(self, row: BatchRow, logits: mx.array | None = None) -> list[TokenSampled]:
        """The row takes part from the next step on.

        With the logits (1, vocabulary) after its last token, which is in its context then, it
        chooses the next one now. Raises what its grammar raises.
        """
        first = [] if logits is None else [_first_token(row, logits)]
        self.rows.append(row)
        return first

    def leave(self, slot: int) -> None:
        """Remove the slot's row; its context holds the tokens of its KV."""
        self.rows = [row for row in self.rows if row.slot != slot]
        if self.in_flight is not None and any(row.slot == slot for row in self.in_flight.rows):
            # Other threads may read its KV from now on.
            self.submit()

    def step(self, *, is_prefilling: bool = False) -> list[TokenSampled]:
        """The tokens that every row chose.

        `is_prefilling`: a prefill chunk follows; nothing is in flight then.
        """
        self._is_prefilling = is_prefilling
        began = time.perf_counter()
        self.in_flight = landed = self.in_flight or self._build()
        if landed is None:
            return []
        self.submit()
        self.in_flight = self._build() if self._goes_ahead_of(landed) else None
        if has_gpu():
            self.submit()
        tokens = self._collect(landed)
        if len(tokens) >= len(landed.rows):
            self._learn(landed, tokens, time.perf_counter() - began)
        return tokens

    def sync(self) -> list[TokenSampled]:
        """Read the step in flight without building another."""
        self.submit()
        landed = self.in_flight
        self.in_flight = None
        return self._collect(landed)

    def submit(self) -> None:
        """Have MLX compute the step in flight."""
        arrays = self._unsubmitted
        self._unsubmitted = []
        if arrays:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]

    def take_broken(self) -> list[tuple[BatchRow, Exception]]:
        """Rows whose own rules raised; each is returned once and must leave."""
        broken = self._broken
        self._broken = []
        return broken

    def reset(self) -> None:
        """Forget all rows and whatever is in flight."""
        self.rows = []
        self._broken = []
        self.in_flight = None
        self._unsubmitted = []
        if self._stacker is not None:
            self._stacker.release()

    def _goes_ahead_of(self, landed: InFlightStep) -> bool:
        """Whether another step is built before `landed` is read."""
        is_free = not (self._is_prefilling or self._broken or any(row.draft for row in landed.rows))
        # A guide reads the last token; a CPU would compute the next logits before.
        is_guided = any(row.sampler.is_guided for row in self.rows)
        can_read = has_gpu() or not is_guided
        return self.is_ahead and is_free and can_read and not self._may_draft()

    def _build(self) -> InFlightStep | None:
        began = time.perf_counter()
        rows = self._draft([row for row in self.rows if row.n_left])
        if not rows:
            return None
        modeled = frozenset(i for i, row in enumerate(rows) if row.draft and _is_modeled(row))
        drafting_s = time.perf_counter() - began if modeled else 0.0
        for row in rows:
            if row.draft:
                row.context.begin_draft(len(row.known) + len(row.draft))
        positions = [len(row.context) + len(row.replay) for row in rows]
        logits, states, passes = self._forward(rows)
        kept = _keep_logits(rows, positions, logits) if states[0] is None else []
        for row in rows:
            if not row.draft and row.known:
                row.extend(row.known)
        chosen = self._sample(rows, logits)
        for row, choices in zip(rows, chosen, strict=True):
            if choices and not row.draft:
                row.input_token = choices[0].token
                row.n_left -= 1
        arrays = [array for choices in chosen for choice in choices for array in choice.arrays]
        self._unsubmitted = arrays + kept
        return InFlightStep(rows, chosen, positions, states, passes, modeled, drafting_s)

    def _draft(self, rows: list[BatchRow]) -> list[BatchRow]:
        """Rows with their drafts; none while a token in flight decides."""
        for row in rows:
            row.draft = ()
        if self.in_flight is not None:
            return rows
        offers: dict[int, DraftOffer] = {}
        for i, row in enumerate(rows):
            try:
                offers[i] = row.propose()
            except Exception as error:
                self._broken.append((row, error))
        rows = [rows[i] for i in offers]
        made = list(offers.values())
        modeled = self._draft_by_model(rows, made)
        for i, (row, n) in enumerate(zip(rows, self._widths(rows, made), strict=True)):
            if row.drafter is not None:
                row.draft = row.drafter.take(modeled.get(i, n))
        return rows

    def _may_draft(self) -> bool:
        """Whether the tokens in flight are likely to be followed by a draft."""
        rows = [row for row in self.rows if row.n_left]
        offers = [row.expected() for row in rows]
        return any(self._widths(rows, offers)) or bool(self._model_widths(rows, offers))

    def _model_widths(
        self, rows: Sequence[BatchRow], offers: Sequence[DraftOffer]
    ) -> dict[int, int]:
        """Draft model tokens for rows without another draft."""
        if self.draft_model is None or not rows:
            return {}
        free = {i: rows[i] for i, offer in enumerate(offers) if not offer.n_tokens}
        layout = self._layout(rows[0])
        counts = [offer.n_known for offer in offers]
        plan = DraftPlan(counts, self.costs, layout, self._bounds(rows, layout))
        return self.draft_model.plan(free, plan)

    def _draft_by_model(self, rows: Sequence[BatchRow], offers: list[DraftOffer]) -> dict[int, int]:
        """Draft by the model; other drafts are weighed beside it."""
        widths = self._model_widths(rows, offers)
        if self.draft_model is None or not widths:
            return {}
        drafts = self.draft_model.draft([rows[i] for i in widths], list(widths.values()))
        drafted: dict[int, int] = {}
        for i, tokens in zip(widths, drafts, strict=True):
            drafter = rows[i].drafter
            assert drafter is not None
            drafted[i] = drafter.use_model(tokens, self.draft_model.record.rate)
            offers[i] = DraftOffer(rate=self.draft_model.record.rate, n_known=1 + drafted[i])
        return drafted

    def _learn(self, landed: InFlightStep, tokens: Sequence[TokenSampled], seconds: float) -> None:
        """Learn the seconds and draft acceptance of a step whose rows draft."""
        if not landed.passes:
            return
        self.costs = observe_passes(self.costs, landed.passes, seconds - landed.drafting_s)
        if self.draft_model is None:
            return
        counts = [
            1 if i in landed.modeled else 1 + len(row.draft) for i, row in enumerate(landed.rows)
        ]
        plan = DraftPlan(counts, self.costs, self._layout(landed.rows[0]))
        chosen = Counter(event.request for event in tokens)
        n_drafted = sum(len(landed.rows[i].draft) for i in landed.modeled)
        n_accepted = sum(chosen[landed.rows[i].request] - 1 for i in landed.modeled)
        self.draft_model.settle(n_drafted, n_accepted, seconds, plan)

    def _widths(self, rows: Sequence[BatchRow], offers: Sequence[DraftOffer]) -> list[int]:
        if not any(offer.n_tokens for offer in offers):
            return [0] * len(offers)
        layout = self._layout(rows[0])
        return widths(offers, self.costs, layout, self._bounds(rows, layout))

    def _bounds(self, rows: Sequence[BatchRow], layout: PassLayout) -> StepBounds:
        plain_s = step_seconds([1] * len(rows), self.costs, layout)
        most_s = draft_bound(plain_s, len(rows), self._policy, is_prefilling=self._is_prefilling)
        return StepBounds(most_s, tuple(row.lead_s for row in rows))

    def _layout(self, row: BatchRow) -> PassLayout:
        return self.runner.layout(row.context.own_caches)

    def _expected_seconds(self, flight: InFlightStep) -> tuple[float, float]:
        """Expected seconds of a step, and of one without drafts.

        Where no row drafts they are not known, but equal.
        """
        if not flight.passes:
            return 1.0, 1.0
        layout = self._layout(flight.rows[0])
        taken_s = flight.drafting_s + pass_seconds(flight.passes, self.costs)
        return taken_s, step_seconds([1] * len(flight.rows), self.costs, layout)

    def _sample(self, rows: Sequence[BatchRow], logits: mx.array) -> list[tuple[Choice, ...]]:
        """Samples of each row; rows that raise go to the broken ones."""
        if any(row.sampler.is_guided for row in rows):
            # The device goes on while a guide reads its last token and works out the next mask.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        chosen: list[tuple[Choice, ...]] = []
        drafts = [row.draft for row in rows]
        results = sample_rows([row.sampler for row in rows], logits, drafts)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Exception):
                self._broken.append((row, result))
                chosen.append(())
            else:
                chosen.append(result)
        return chosen

    def _forward(
        self, rows: Sequence[BatchRow]
    ) -> tuple[mx.array, list[mx.array | None], list[int]]:
        """Logits (1 + draft of each row, vocabulary) without replayed tokens.

        Also the rows' hidden states, where a draft model needs them, and the widths of the passes.
        """
        views = self._stacked_views(rows)
        plan = [SlotTokens(row.context.own_caches, row.tokens, row.shift) for row in rows]
        before = self.runner.n_calls
        needs_states = isinstance(self.draft_model, MTPDrafter)
        run = self.runner.states if needs_states else self.runner.execute
        output = run(plan) if views is None else run(plan, views)
        self.n_calls += self.runner.n_calls - before
        self.n_rows += len(rows)
        passes = self._pass_widths(rows, [slot.n_tokens for slot in plan])
        if any(row.replay for row in rows):
            output = output[mx.array(_new_lines(rows))]
        if not needs_states:
            return output, [None] * len(rows), passes
        ends = list(accumulate(1 + len(row.draft) for row in rows))[:-1]
        return self.runner.logits(output), [*mx.split(output, ends)], passes

    def _pass_widths(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> list[int]:
        """Widths of the passes with these tokens, where a row drafts."""
        is_drafting = any(row.drafter is not None for row in rows)
        if is_drafting:
            return pass_widths(counts, self._layout(rows[0]))
        return []

    def _stacked_views(self, rows: Sequence[BatchRow]) -> list[Any] | None:
        """Views of stacked rows, when each brings one token."""
        if len(rows) == 1:
            rows[0].context.unstack()
            return None
        if self._stacker is None:
            return None
        if not any(row.draft or row.replay for row in rows):
            return self._stacker.views([row.context for row in rows], [row.shift for row in rows])
        self._stacker.release()
        return None

    def _collect(self, flight: InFlightStep | None) -> list[TokenSampled]:
        if flight is None:
            return []
        mx.eval([choice.token for choices in flight.choices for choice in choices])
        taken_s, plain_s = self._expected_seconds(flight)
        self.plain_share = plain_s / taken_s
        # A row that raised ahead was fed all the same: its KV holds this token.
        ahead = {id(row) for row in self.in_flight.rows} if self.in_flight else set()
        running = {id(row) for row in self.rows}
        sampled = []
        each = zip(flight.rows, flight.choices, flight.positions, flight.states, strict=True)
        for row, choices, position, states in each:
            draft = row.draft
            is_running = id(row) in running
            if not is_running and id(row) not in ahead:
                continue
            tokens = _accepted(draft, choices)
            if draft:
                _settle(row, choices, tokens)
                self.n_drafts += 1
                self.n_drafted += len(draft)
                self.n_accepted += max(0, len(tokens) - 1)
            elif tokens and id(row) in ahead:
                row.context.extend(tokens)
            elif tokens:
                row.pending = tokens[0]
            if row.drafter is not None:
                row.lead_s = lead_after(row.lead_s, max(0, len(tokens) - 1), taken_s, plain_s)
                if tokens:
                    row.drafter.settle(tokens, len(draft))
            if row.context.draft is not None:
                row.context.draft.rewind(len(row.context) + len(row.replay))
            if isinstance(self.draft_model, MTPDrafter) and states is not None and tokens:
                known = [*row.context.tokens[position:], *row.replay][: len(tokens)]
                fed = states[: len(tokens)]
                self.draft_model.follow(row.context, position, fed, [*known, tokens[-1]])
            if is_running:
                sampled += [_event(row, *pair) for pair in zip(tokens, choices, strict=False)]
        return sampled


def _first_token(row: BatchRow, logits: mx.array) -> TokenSampled:
    """Token that the row chooses from these logits."""
    (chosen,) = sample_rows([row.sampler], logits)
    if isinstance(chosen, Exception):
        raise chosen
    row.input_token = chosen[0].token
    row.pending = int(row.input_token.item().real)
    row.n_left -= 1
    row.is_at_prompt = False
    if row.drafter is not None:
        row.drafter.settle([row.pending], 0)
    return _event(row, row.pending, chosen[0])


def _keep_logits(
    rows: Sequence[BatchRow], positions: Sequence[int], logits: mx.array
) -> list[mx.array]:
    """Keep the logits after each prompt, for the same prompt again."""
    kept: list[mx.array] = []
    start = 0
    for row, position in zip(rows, positions, strict=True):
        if row.is_at_prompt:
            row.is_at_prompt = False
            # A slice would hold the buffer of all rows.
            kept.append(mx.take(logits, mx.array([start]), axis=0))
            row.context.keep_logits(position + 1, kept[-1])
        start += 1 + len(row.draft)
    return kept


def _is_modeled(row: BatchRow) -> bool:
    return row.drafter is not None and row.drafter.source is DraftSource.MODEL


def _new_lines(rows: Sequence[BatchRow]) -> list[int]:
    """Logits after the last token of each row and its draft."""
    lines: list[int] = []
    start = 0
    for row in rows:
        end = start + len(row.replay) + 1 + len(row.draft)
        lines += range(start + len(row.replay), end)
        start = end
    return lines


def _accepted(draft: Sequence[int], choices: Sequence[Choice]) -> list[int]:
    """Sampled tokens up to the first refused draft token."""
    tokens: list[int] = []
    for choice, drafted in zip_longest(choices, draft[: len(choices)]):
        tokens.append(int(choice.token.item().real))
        if tokens[-1] != drafted:
            break
    return tokens


def _settle(row: BatchRow, choices: Sequence[Choice], tokens: Sequence[int]) -> None:
    """Remove refused draft tokens from the row's caches."""
    kept = [*row.known, *tokens[:-1]]
    is_kept = row.context.end_draft(*kept)
    row.pending = None
    row.replay = [] if is_kept else kept
    if not tokens:
        return
    row.sampler.accept([choice.token for choice in choices[: len(tokens)]], len(row.draft))
    row.pending = tokens[-1]
    row.input_token = choices[len(tokens) - 1].token
    row.n_left -= len(tokens)


def _event(row: BatchRow, token: int, choice: Choice) -> TokenSampled:
    if choice.logprob is None:
        return TokenSampled(row.request, token)
    logprob = choice.logprob.item()
    top: tuple[tuple[int, float], ...] = ()
    if choice.top_tokens is not None and choice.top_logprobs is not None:
        columns: list[Any] = [choice.top_tokens.tolist(), choice.top_logprobs.tolist()]
        top = tuple(zip(*columns, strict=True))
    return TokenSampled(row.request, token, float(logprob.real), top)
