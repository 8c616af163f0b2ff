"""Batched decoding of the running slots.

The next step is built before the last one is read, but for rows that expect proposed tokens.
"""

import time
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

import mlx.core as mx

from mlxstack.core.engine_events import TokenSampled
from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.decode.proposer import NO_PROPOSALS, Proposer
from mlxstack.engine.decode.row_grouper import NO_GROUPS, RowGrouper
from mlxstack.engine.decode.sampler import Choice, sample_rows
from mlxstack.engine.device import has_gpu
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.engine.model.token_inputs import PLAIN_TOKENS, TokenInputs


class Batch:
    """The running rows. Joining and leaving touch no other row's arrays.

    With `is_ahead` the graph of a step is built while the last one is computed. A GPU gets it at
    once, which keeps it busy; on a CPU MLX computes most of a step before submitting it returns,
    so there the last tokens are returned first. Proposals and prefill chunks need the last tokens:
    nothing is built ahead of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer = NO_PROPOSALS,
        inputs: TokenInputs = PLAIN_TOKENS,
        grouper: RowGrouper = NO_GROUPS,
    ) -> None:
        self.runner = runner
        self.proposer = proposer
        self.inputs = inputs
        self._grouper = grouper
        self._is_prefilling = False
        self.in_flight: Sequence[RowStep] = ()
        """The step that was built and not read yet, by row."""
        self._unsubmitted: list[mx.array] = []
        """Arrays of the step in flight, until MLX has been told to compute them."""
        self.rows: list[BatchRow] = []
        self._broken: list[tuple[BatchRow, Exception]] = []
        self.is_ahead = runner.can_run_ahead
        self.n_calls = 0
        self.n_rows = 0

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
        if any(taken.row.slot == slot for taken in self.in_flight):
            # Other threads may read its KV from now on.
            self.submit()

    def step(self, *, is_prefilling: bool = False) -> list[TokenSampled]:
        """The tokens that every row chose.

        `is_prefilling`: a prefill chunk follows; nothing is in flight then.
        """
        self._is_prefilling = is_prefilling
        began = time.perf_counter()
        step = self.in_flight or self._build()
        self.in_flight = step
        if not step:
            return []
        self.submit()
        self.in_flight = self._build() if self._goes_ahead_of(step) else ()
        if has_gpu():
            self.submit()
        return self._collect(step, began)

    def sync(self) -> list[TokenSampled]:
        """Read the step in flight without building another."""
        self.submit()
        step = self.in_flight
        self.in_flight = ()
        return self._collect(step)

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
        self.in_flight = ()
        self._unsubmitted = []
        self._grouper.release()

    @property
    def _running(self) -> list[BatchRow]:
        return [row for row in self.rows if row.n_left]

    def _goes_ahead_of(self, step: Sequence[RowStep]) -> bool:
        """Whether another step is built before `step` is read."""
        is_verifying = any(taken.row.proposed for taken in step)
        is_free = not (self._is_prefilling or self._broken or is_verifying)
        # A guide reads the last token; a CPU would compute the next logits before.
        is_guided = any(row.sampler.is_guided for row in self.rows)
        can_read = has_gpu() or not is_guided
        return self.is_ahead and is_free and can_read and not self.proposer.expects(self._running)

    def _build(self) -> Sequence[RowStep]:
        rows = self._propose()
        if not rows:
            return ()
        for row in rows:
            if row.proposed:
                row.context.begin_proposal(len(row.known) + len(row.proposed))
        positions = [len(row.context) + len(row.rolled_back) for row in rows]
        plan = [SlotTokens(row.context.own_caches, row.tokens, row.shift) for row in rows]
        logits, states = self._forward(rows, plan)
        prompt_logits = [] if self.proposer.needs_states else _keep_logits(rows, positions, logits)
        for row in rows:
            if not row.proposed and row.known:
                row.extend(row.known)
        step = []
        for i, choices in enumerate(self._sample(rows, logits)):
            if choices and not rows[i].proposed:
                rows[i].choose(choices[0])
            step.append(RowStep(rows[i], choices, positions[i], plan[i].n_tokens, states[i]))
        arrays = [array for taken in step for choice in taken.choices for array in choice.arrays]
        self._unsubmitted = arrays + prompt_logits
        return step

    def _propose(self) -> list[BatchRow]:
        """Rows with their proposed tokens; none while a token in flight decides."""
        rows = self._running
        for row in rows:
            row.proposed = ()
        if self.in_flight:
            return rows
        broken = self.proposer.propose(rows, is_prefilling=self._is_prefilling)
        self._broken += broken
        stopped = [row for row, _ in broken]
        return [row for row in rows if row not in stopped]

    def _sample(self, rows: Sequence[BatchRow], logits: mx.array) -> list[tuple[Choice, ...]]:
        """Samples of each row; rows that raise go to the broken ones."""
        if any(row.sampler.is_guided for row in rows):
            # The device goes on while a guide reads its last token and works out the next mask.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        chosen: list[tuple[Choice, ...]] = []
        proposals = [row.proposed for row in rows]
        results = sample_rows([row.sampler for row in rows], logits, proposals)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Exception):
                self._broken.append((row, result))
                chosen.append(())
            else:
                chosen.append(result)
        return chosen

    def _forward(
        self, rows: Sequence[BatchRow], plan: Sequence[SlotTokens]
    ) -> tuple[mx.array, Sequence[mx.array | None]]:
        """Logits (1 + proposed of each row, vocabulary) without those fed again.

        Also the rows' hidden states, where the proposer needs them.
        """
        views = self._grouper.views(rows)
        before = self.runner.n_calls
        needs_states = self.proposer.needs_states
        run = self.runner.states if needs_states else self.runner.execute
        output = run(plan, views)
        self.n_calls += self.runner.n_calls - before
        self.n_rows += len(rows)
        if any(row.rolled_back for row in rows):
            output = output[mx.array(_new_lines(rows))]
        if not needs_states:
            return output, [None] * len(rows)
        ends = list(accumulate(1 + len(row.proposed) for row in rows))[:-1]
        return self.runner.logits(output), list(mx.split(output, ends))

    def _collect(self, step: Sequence[RowStep], began: float | None = None) -> list[TokenSampled]:
        """Read the tokens of a step, which is measured from `began` on."""
        if not step:
            return []
        mx.eval([choice.token for taken in step for choice in taken.choices])
        # A row that raised ahead was fed all the same: its KV holds this token.
        ahead = {id(taken.row) for taken in self.in_flight}
        running = {id(row) for row in self.rows}
        outcomes: list[list[int] | None] = []
        sampled: list[TokenSampled] = []
        for taken in step:
            row = taken.row
            if id(row) not in running and id(row) not in ahead:
                outcomes.append(None)
                continue
            tokens = _read(taken, is_fed=id(row) in ahead)
            outcomes.append(tokens)
            if id(row) in running:
                sampled += [_event(row, *pair) for pair in zip(tokens, taken.choices, strict=False)]
        seconds = None
        if began is not None and len(sampled) >= len(step):
            seconds = time.perf_counter() - began
        self.proposer.settle(step, outcomes, seconds)
        return sampled


def _first_token(row: BatchRow, logits: mx.array) -> TokenSampled:
    """Token that the row chooses from these logits."""
    (choices,) = sample_rows([row.sampler], logits)
    if isinstance(choices, Exception):
        raise choices
    (choice,) = choices
    row.choose(choice)
    token = int(choice.token.item().real)
    row.pending = token
    row.is_at_prompt = False
    if row.proposal_source is not None:
        row.proposal_source.observe([token])
    return _event(row, token, choice)


def _keep_logits(
    rows: Sequence[BatchRow], positions: Sequence[int], logits: mx.array
) -> list[mx.array]:
    """Keep the logits after each prompt, for the same prompt again."""
    prompt_logits: list[mx.array] = []
    start = 0
    for row, position in zip(rows, positions, strict=True):
        if row.is_at_prompt:
            row.is_at_prompt = False
            # A slice would hold the buffer of all rows.
            prompt_logits.append(mx.take(logits, mx.array([start]), axis=0))
            row.context.keep_logits(position + 1, prompt_logits[-1])
        start += 1 + len(row.proposed)
    return prompt_logits


def _new_lines(rows: Sequence[BatchRow]) -> list[int]:
    """Lines of logits after the newest token of each row."""
    lines: list[int] = []
    start = 0
    for row in rows:
        end = start + len(row.rolled_back) + 1 + len(row.proposed)
        lines += range(start + len(row.rolled_back), end)
        start = end
    return lines


def _read(taken: RowStep, *, is_fed: bool) -> list[int]:
    """Read the tokens; a step ahead feeds the last if `is_fed`."""
    row = taken.row
    tokens = _accepted(row.proposed, taken.choices)
    if row.proposed:
        row.settle(taken.choices, tokens)
    elif tokens and is_fed:
        row.context.extend(tokens)
    elif tokens:
        row.pending = tokens[0]
    return tokens


def _accepted(proposed: Sequence[int], choices: Sequence[Choice]) -> list[int]:
    """Sampled tokens up to the first refused one of the proposed."""
    tokens: list[int] = []
    for choice, expected in zip_longest(choices, proposed[: len(choices)]):
        tokens.append(int(choice.token.item().real))
        if tokens[-1] != expected:
            break
    return tokens


def _event(row: BatchRow, token: int, choice: Choice) -> TokenSampled:
    if choice.logprob is None:
        return TokenSampled(row.request, token)
    logprob = float(choice.logprob.item().real)
    top: tuple[tuple[int, float], ...] = ()
    if choice.top_tokens is not None and choice.top_logprobs is not None:
        columns: list[Any] = [choice.top_tokens.tolist(), choice.top_logprobs.tolist()]
        top = tuple(zip(*columns, strict=True))
    return TokenSampled(row.request, token, logprob, top)
