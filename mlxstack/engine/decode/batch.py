"""Batched decoding of the running slots, with drafts.

The next step is built before the last one is read, but for rows whose tokens may be drafted.
"""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import inf
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.engine_events import TokenSampled
from mlxstack.engine.decode.draft_model import DraftModel, DraftPlan
from mlxstack.engine.decode.drafter import NO_OFFER, Drafter, DraftSource
from mlxstack.engine.decode.row_stack import RowStacker
from mlxstack.engine.decode.sampler import Choice, Sampler, sample_rows
from mlxstack.engine.device import has_gpu
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.drafts.ngram_draft_governor import (
    MOST_DRAFTED,
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

DEFAULT_PACE = PrefillPolicy()
NO_DRAFT: tuple[int, ...] = ()


class BatchRow:
    """Slot in the running batch; `input_token` (1,) may be lazy.

    `n_left` tokens at most are still to be sampled. Positions are indices plus `shift`. `request`
    is the id in the events of its tokens.
    """

    def __init__(
        self,
        slot: int,
        context: SlotContext,
        sampler: Sampler,
        last: int,
        n_left: float = inf,
        drafter: Drafter | None = None,
        shift: int = 0,
        request: str = "",
    ) -> None:
        self.slot = slot
        self.request = request
        self.shift = shift
        self.n_left = n_left
        self.context = context
        self.sampler = sampler
        self.drafter = drafter
        self.input_token = mx.array([last])
        self.pending: int | None = last
        """The token of `input_token` once its value is known; it enters the context when fed."""
        self.lead_s = 0.0
        """Seconds that drafts have saved it so far, and by which others may delay it."""
        self.replay: list[int] = []
        """Tokens before it that a rollback took out of recurrent state."""
        self.is_at_prompt = True
        """Whether `pending` is the last token of the prompt."""

    def expected(self) -> DraftOffer:
        """The draft that may be possible once the token in flight is known."""
        return self.drafter.expected(self.sampler.is_ruled) if self.drafter else NO_OFFER

    @property
    def known(self) -> list[int]:
        """The known tokens that the next pass feeds."""
        return self.replay if self.pending is None else [*self.replay, self.pending]

    def tokens(self, draft: Sequence[int]) -> mx.array:
        """The tokens (n,) that this row feeds."""
        return mx.array([*self.known, *draft]) if self.replay or draft else self.input_token

    def propose(self) -> DraftOffer:
        """Prepare a draft; none after a rollback of recurrent state.

        KV is quantized between passes, so a draft ends at the latest where that is due.
        """
        if self.replay:
            return DraftOffer(n_known=len(self.replay) + 1)
        if self.drafter is None:
            return NO_OFFER
        return self.drafter.propose(self.sampler.forced_tokens(), self.most_drafted)

    @property
    def most_drafted(self) -> int:
        """Draft tokens that may go into the next pass."""
        due = self.context.quantized_start - len(self.context)
        most = min(self.n_left, due if due > 0 else inf, MOST_DRAFTED + 1) - 1
        return 0 if self.replay else int(most)

    def extend(self, tokens: Sequence[int]) -> None:
        """The caches hold these known tokens now."""
        self.context.extend(tokens)
        self.pending, self.replay = None, []


RowToken = tuple[BatchRow, TokenSampled]
"""Token that a row sampled in one step."""


class InFlightStep(Struct, frozen=True):
    """A built step that was not read yet, by rows.

    A row without choices has rules that raised after the model had run. `positions` are those of
    the token before the first choice, and `states` the hidden states (1 + draft, dim) from there
    on. `passes` are widths, none where no row drafts. The draft model took `drafting_s` seconds,
    for the rows at `modeled`.
    """

    rows: Sequence[BatchRow]
    drafts: Sequence[tuple[int, ...]]
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
        pace: PrefillPolicy = DEFAULT_PACE,
        stacker: RowStacker | None = None,
    ) -> None:
        self.runner = runner
        self._stacker = stacker
        self._pace = pace
        self._is_prefilling = False
        self.plain_share = 1.0
        """Share of the seconds of the last step that was read which it takes without drafts."""
        self._in_flight: InFlightStep | None = None
        self._unsubmitted: list[mx.array] = []
        """Arrays of the step in flight, until MLX has been told to compute them."""
        self.rows: list[BatchRow] = []
        self._broken: list[tuple[BatchRow, Exception]] = []
        self.is_ahead = runner.can_run_ahead
        self.costs = costs
        self.draft_model = draft_model
        if draft_model is not None and runner.images is not None:
            draft_model.placeholder = runner.images.placeholder
        self.n_calls = 0
        self.n_rows = 0
        self.n_drafts = 0
        self.n_drafted = 0
        self.n_accepted = 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a built step has not been read yet."""
        return self._in_flight is not None

    @property
    def is_busy(self) -> bool:
        """Whether there is a row to feed or a step to read."""
        return bool(self.rows or self._in_flight)

    def join(self, row: BatchRow, logits: mx.array | None = None) -> list[RowToken]:
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
        if self._in_flight is not None and any(row.slot == slot for row in self._in_flight.rows):
            # Other threads may read its KV from now on.
            self.submit()

    def step(self, *, is_prefilling: bool = False) -> list[RowToken]:
        """The tokens that every row chose.

        `is_prefilling`: a prefill chunk follows; nothing is in flight then.
        """
        self._is_prefilling = is_prefilling
        began = time.perf_counter()
        self._in_flight = landed = self._in_flight or self._build()
        if landed is None:
            return []
        self.submit()
        self._in_flight = self._build() if self._goes_ahead_of(landed) else None
        if has_gpu():
            self.submit()
        tokens = self._collect(landed)
        if len(tokens) >= len(landed.rows):
            self._learn(landed, tokens, time.perf_counter() - began)
        return tokens

    def sync(self) -> list[RowToken]:
        """Read the step in flight without building another."""
        self.submit()
        landed, self._in_flight = self._in_flight, None
        return self._collect(landed)

    def submit(self) -> None:
        """Have MLX compute the step in flight."""
        arrays, self._unsubmitted = self._unsubmitted, []
        if arrays:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]

    def take_broken(self) -> list[tuple[BatchRow, Exception]]:
        """Rows whose own rules raised; each is returned once and must leave."""
        broken, self._broken = self._broken, []
        return broken

    def reset(self) -> None:
        """Forget all rows and whatever is in flight."""
        self.rows = []
        self._broken = []
        self._in_flight = None
        self._unsubmitted = []
        if self._stacker is not None:
            self._stacker.release()

    def _goes_ahead_of(self, landed: InFlightStep) -> bool:
        """Whether another step is built before `landed` is read."""
        is_free = not (self._is_prefilling or self._broken or any(landed.drafts))
        # A guide reads the last token; a CPU would compute the next logits before.
        is_guided = any(row.sampler.is_guided for row in self.rows)
        can_read = has_gpu() or not is_guided
        return self.is_ahead and is_free and can_read and not self._may_draft()

    def _build(self) -> InFlightStep | None:
        began = time.perf_counter()
        rows, drafts = self._draft([row for row in self.rows if row.n_left])
        if not rows:
            return None
        modeled = frozenset(i for i, row in enumerate(rows) if drafts[i] and _is_modeled(row))
        drafting_s = time.perf_counter() - began if modeled else 0.0
        for row, draft in zip(rows, drafts, strict=True):
            if draft:
                row.context.begin_draft(len(row.known) + len(draft))
        positions = [len(row.context) + len(row.replay) for row in rows]
        logits, states, passes = self._forward(rows, drafts)
        kept = _keep_logits(rows, drafts, positions, logits) if states[0] is None else []
        for row, draft in zip(rows, drafts, strict=True):
            if not draft and row.known:
                row.extend(row.known)
        chosen = self._sample(rows, logits, drafts)
        for row, draft, choices in zip(rows, drafts, chosen, strict=True):
            if choices and not draft:
                row.input_token = choices[0][0]
                row.n_left -= 1
        arrays = [a for choices in chosen for choice in choices for a in choice]
        self._unsubmitted = arrays + kept
        return InFlightStep(rows, drafts, chosen, positions, states, passes, modeled, drafting_s)

    def _draft(self, rows: list[BatchRow]) -> tuple[list[BatchRow], list[tuple[int, ...]]]:
        """Rows and their drafts; none while a token in flight decides."""
        if self._in_flight is not None:
            return rows, [NO_DRAFT] * len(rows)
        offers: dict[int, DraftOffer] = {}
        for i, row in enumerate(rows):
            try:
                offers[i] = row.propose()
            except Exception as error:
                self._broken.append((row, error))
        rows = [rows[i] for i in offers]
        made = list(offers.values())
        modeled = self._draft_by_model(rows, made)
        counts = [modeled.get(i, n) for i, n in enumerate(self._widths(rows, made))]
        each = zip(rows, counts, strict=True)
        return rows, [row.drafter.take(n) if row.drafter else NO_DRAFT for row, n in each]

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

    def _learn(self, landed: InFlightStep, tokens: Sequence[RowToken], seconds: float) -> None:
        """Learn the seconds and draft acceptance of a step whose rows draft."""
        if not landed.passes:
            return
        self.costs = observe_passes(self.costs, landed.passes, seconds - landed.drafting_s)
        if self.draft_model is None:
            return
        counts = [
            1 if i in landed.modeled else 1 + len(draft) for i, draft in enumerate(landed.drafts)
        ]
        plan = DraftPlan(counts, self.costs, self._layout(landed.rows[0]))
        chosen = Counter(id(row) for row, _ in tokens)
        n_drafted = sum(len(landed.drafts[i]) for i in landed.modeled)
        n_accepted = sum(chosen[id(landed.rows[i])] - 1 for i in landed.modeled)
        self.draft_model.settle(n_drafted, n_accepted, seconds, plan)

    def _widths(self, rows: Sequence[BatchRow], offers: Sequence[DraftOffer]) -> list[int]:
        if not any(offer.n_tokens for offer in offers):
            return [0] * len(offers)
        layout = self._layout(rows[0])
        return widths(offers, self.costs, layout, self._bounds(rows, layout))

    def _bounds(self, rows: Sequence[BatchRow], layout: PassLayout) -> StepBounds:
        plain_s = step_seconds([1] * len(rows), self.costs, layout)
        most_s = draft_bound(plain_s, len(rows), self._pace, is_prefilling=self._is_prefilling)
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

    def _sample(
        self, rows: Sequence[BatchRow], logits: mx.array, drafts: Sequence[tuple[int, ...]]
    ) -> list[tuple[Choice, ...]]:
        """Samples of each row; rows that raise go to the broken ones."""
        if any(row.sampler.is_guided for row in rows):
            # The device goes on while a guide reads its last token and works out the next mask.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        chosen: list[tuple[Choice, ...]] = []
        results = sample_rows([row.sampler for row in rows], logits, drafts)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Exception):
                self._broken.append((row, result))
                chosen.append(())
            else:
                chosen.append(result)
        return chosen

    def _forward(
        self, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]]
    ) -> tuple[mx.array, list[mx.array | None], list[int]]:
        """Logits (1 + draft of each row, vocabulary) without replayed tokens.

        Also the rows' hidden states, where a draft model needs them, and the widths of the passes.
        """
        views = self._stacked_views(rows, drafts)
        plan = [
            SlotTokens(row.context.own_caches, row.tokens(draft), row.shift)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        before = self.runner.n_calls
        needs_states = self.draft_model is not None and self.draft_model.target is not None
        run = self.runner.states if needs_states else self.runner.execute
        output = run(plan) if views is None else run(plan, views)
        self.n_calls += self.runner.n_calls - before
        self.n_rows += len(rows)
        passes = self._pass_widths(rows, [slot.n_tokens for slot in plan])
        n_replayed = [len(row.replay) for row in rows]
        if any(n_replayed):
            output = output[mx.array(_new_lines(n_replayed, drafts))]
        if not needs_states:
            return output, [None] * len(rows), passes
        ends = list(accumulate(1 + len(draft) for draft in drafts))[:-1]
        return self.runner.logits(output), [*mx.split(output, ends)], passes

    def _pass_widths(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> list[int]:
        """Widths of the passes with these tokens, where a row drafts."""
        is_drafting = any(row.drafter is not None for row in rows)
        return pass_widths(counts, self._layout(rows[0])) if is_drafting else []

    def _stacked_views(
        self, rows: Sequence[BatchRow], drafts: Sequence[tuple[int, ...]]
    ) -> list[Any] | None:
        """Views of stacked rows, when each brings one token."""
        if len(rows) == 1:
            rows[0].context.unstack()
            return None
        if self._stacker is None:
            return None
        if not any(drafts) and not any(row.replay for row in rows):
            return self._stacker.views([row.context for row in rows], [row.shift for row in rows])
        self._stacker.release()
        return None

    def _collect(self, flight: InFlightStep | None) -> list[RowToken]:
        if flight is None:
            return []
        mx.eval([token for choices in flight.choices for token, *_ in choices])
        taken_s, plain_s = self._expected_seconds(flight)
        self.plain_share = plain_s / taken_s
        # A row that raised ahead was fed all the same: its KV holds this token.
        ahead = {id(row) for row in self._in_flight.rows} if self._in_flight else set()
        running = {id(row) for row in self.rows}
        sampled = []
        each = zip(
            flight.rows, flight.drafts, flight.choices, flight.positions, flight.states, strict=True
        )
        for row, draft, choices, position, states in each:
            is_running = id(row) in running
            if not is_running and id(row) not in ahead:
                continue
            tokens = _accepted(draft, choices)
            if draft:
                _settle(row, draft, choices, tokens)
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
            if self.draft_model is not None and states is not None and tokens:
                known = [*row.context.tokens[position:], *row.replay][: len(tokens)]
                fed = states[: len(tokens)]
                self.draft_model.follow(row.context, position, fed, [*known, tokens[-1]])
            if is_running:
                sampled += [(row, _event(row, *one)) for one in zip(tokens, choices, strict=False)]
        return sampled


def _first_token(row: BatchRow, logits: mx.array) -> RowToken:
    """Token that the row chooses from these logits."""
    (chosen,) = sample_rows([row.sampler], logits)
    if isinstance(chosen, Exception):
        raise chosen
    row.input_token = chosen[0][0]
    row.pending = int(row.input_token.item().real)
    row.n_left -= 1
    row.is_at_prompt = False
    if row.drafter is not None:
        row.drafter.settle([row.pending], 0)
    return row, _event(row, row.pending, chosen[0])


def _keep_logits(
    rows: Sequence[BatchRow],
    drafts: Sequence[tuple[int, ...]],
    positions: Sequence[int],
    logits: mx.array,
) -> list[mx.array]:
    """Keep the logits after each prompt, for the same prompt again."""
    kept: list[mx.array] = []
    start = 0
    for row, draft, position in zip(rows, drafts, positions, strict=True):
        if row.is_at_prompt:
            row.is_at_prompt = False
            # A slice would hold the buffer of all rows.
            kept.append(mx.take(logits, mx.array([start]), axis=0))
            row.context.keep_logits(position + 1, kept[-1])
        start += 1 + len(draft)
    return kept


def _is_modeled(row: BatchRow) -> bool:
    return row.drafter is not None and row.drafter.source is DraftSource.MODEL


def _new_lines(n_replayed: Sequence[int], drafts: Sequence[tuple[int, ...]]) -> list[int]:
    """Logits after the last token of each row and its draft."""
    lines: list[int] = []
    start = 0
    for n, draft in zip(n_replayed, drafts, strict=True):
        lines += range(start + n, start + n + 1 + len(draft))
        start += n + 1 + len(draft)
    return lines


def _accepted(draft: Sequence[int], choices: Sequence[Choice]) -> list[int]:
    """Sampled tokens up to the first refused draft token."""
    tokens: list[int] = []
    for (token, *_), drafted in zip_longest(choices, draft[: len(choices)]):
        tokens.append(int(token.item().real))
        if tokens[-1] != drafted:
            break
    return tokens


def _settle(
    row: BatchRow, draft: Sequence[int], choices: Sequence[Choice], tokens: Sequence[int]
) -> None:
    """Remove refused draft tokens from the row's caches."""
    kept = [*row.known, *tokens[:-1]]
    is_kept = row.context.end_draft(*kept)
    row.pending, row.replay = None, [] if is_kept else kept
    if not tokens:
        return
    row.sampler.accept([token for token, *_ in choices[: len(tokens)]], len(draft))
    row.pending = tokens[-1]
    row.input_token = choices[len(tokens) - 1][0]
    row.n_left -= len(tokens)


def _event(row: BatchRow, token: int, choice: Choice) -> TokenSampled:
    values: list[Any] = [array.tolist() for array in choice[1:]]
    logprob = values[0][0] if values else None
    return TokenSampled(row.request, token, logprob, tuple(zip(*values[1:], strict=True)))
