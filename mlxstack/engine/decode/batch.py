"""Decodes one token for every running slot at once; on a GPU the next step is scheduled ahead."""

from math import inf
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.engine.decode.row_views import view
from mlxstack.engine.decode.sampler import SampledToken, Sampler, sample_rows
from mlxstack.engine.device import has_gpu
from mlxstack.engine.kv.slot_context import SlotContext


class BatchRow:
    """A slot in the running batch. `feed` (1,) is its next input token, perhaps still lazy.

    `n_left` tokens at most are still to be sampled.
    """

    def __init__(
        self, slot: int, context: SlotContext, chooser: Sampler, last: int, n_left: float = inf
    ) -> None:
        self.slot = slot
        self.n_left = n_left
        self.context = context
        self.sampler = chooser
        self.input_token = mx.array([last])
        self.pending: int | None = last
        """The token of `feed` once its value is known; it enters the context when it is fed."""


class RowToken(Struct, frozen=True):
    """What a row chose in one step."""

    row: BatchRow
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class InFlightStep(Struct, frozen=True):
    """A step that was scheduled but not read yet.

    `rows` made `choices`; `fed` are these and the rows that raised after the model had run.
    """

    rows: tuple[BatchRow, ...]
    sampled: tuple[SampledToken, ...]
    fed: tuple[BatchRow, ...]


class Batch:
    """The running rows. Joining and leaving touch nobody else's arrays.

    `is_batching` False decodes row by row, each on its own caches: for models that the row
    view does not serve. `is_ahead` schedules a step before the last one is read, which keeps a
    GPU busy; a CPU computes while it schedules, so there it would only delay every token.
    """

    def __init__(self, model: Any, *, is_batching: bool = True) -> None:
        self.model = model
        self._in_flight: InFlightStep | None = None
        self.rows: list[BatchRow] = []
        self._broken: list[tuple[BatchRow, Exception]] = []
        self.is_batching = is_batching
        self.is_ahead = has_gpu()
        self.n_calls = 0
        self.n_rows = 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a scheduled step has not been read yet."""
        return self._in_flight is not None

    @property
    def is_busy(self) -> bool:
        """Whether there is a row to feed or a step to read."""
        return bool(self.rows or self._in_flight)

    def join(self, row: BatchRow) -> None:
        """The row takes part from the next step on."""
        self.rows.append(row)

    def leave(self, slot: int) -> None:
        """The slot's row takes no further part; its context holds every token read so far."""
        self.rows = [row for row in self.rows if row.slot != slot]

    def step(self) -> list[RowToken]:
        """What every row chose: of this step, or, when ahead, of the step before it.

        When ahead the first call reads nothing, and rows at their last token are not fed again.
        """
        landed, self._in_flight = self._in_flight, self._dispatch()
        return self._collect(landed) if self.is_ahead else self.sync()

    def sync(self) -> list[RowToken]:
        """Read the scheduled step without scheduling another; afterwards nothing is in flight."""
        landed, self._in_flight = self._in_flight, None
        return self._collect(landed)

    def take_broken(self) -> list[tuple[BatchRow, Exception]]:
        """The rows whose own rules raised; each is told once and must leave."""
        broken, self._broken = self._broken, []
        return broken

    def reset(self) -> None:
        """Forget all rows and whatever is in flight."""
        self.rows = []
        self._broken = []
        self._in_flight = None

    def _dispatch(self) -> InFlightStep | None:
        rows = tuple(row for row in self.rows if row.n_left)
        if not rows:
            return None
        logits = self._forward(rows)
        for row in rows:
            if row.pending is not None:
                row.context.extend([row.pending])
                row.pending = None
        chosen = self._sample(rows, logits)
        for row, choice in chosen:
            row.input_token = choice.token
            row.n_left -= 1
        mx.async_eval([a for _, choice in chosen for a in _arrays(choice)])  # type: ignore[no-untyped-call]
        return InFlightStep(
            tuple(row for row, _ in chosen), tuple(choice for _, choice in chosen), rows
        )

    def _sample(
        self, rows: tuple[BatchRow, ...], logits: mx.array
    ) -> list[tuple[BatchRow, SampledToken]]:
        """What each row chooses; a row that raises is put among the broken and left out."""
        if any(row.sampler.is_guided for row in rows):
            # The device goes on while a guide reads its last token and works out the next mask.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        chosen = []
        results = sample_rows([row.sampler for row in rows], logits)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Exception):
                self._broken.append((row, result))
            else:
                chosen.append((row, result))
        return chosen

    def _forward(self, rows: tuple[BatchRow, ...]) -> mx.array:
        self.n_rows += len(rows)
        if len(rows) == 1 or not self.is_batching:
            self.n_calls += len(rows)
            each = [self.model(r.input_token[None], cache=r.context.caches)[:, -1] for r in rows]
            return mx.concatenate(each) if len(each) > 1 else each[0]
        self.n_calls += 1
        views = [view(caches) for caches in zip(*(r.context.caches for r in rows), strict=True)]
        tokens = mx.concatenate([row.input_token for row in rows])[:, None]
        logits: mx.array = self.model(tokens, cache=views)[:, -1]
        return logits

    def _collect(self, flight: InFlightStep | None) -> list[RowToken]:
        if flight is None:
            return []
        mx.eval([choice.token for choice in flight.sampled])
        # A row that raised ahead was fed all the same: its KV holds this token.
        ahead = {id(row) for row in self._in_flight.fed} if self._in_flight else set()
        running = {id(row) for row in self.rows}
        sampled = []
        for row, choice in zip(flight.rows, flight.sampled, strict=True):
            if id(row) not in running and id(row) not in ahead:
                continue
            token = int(choice.token.item().real)
            if id(row) in ahead:
                row.context.extend([token])
            else:
                row.pending = token
            if id(row) in running:
                sampled.append(RowToken(row, token, *_numbers(choice)))
        return sampled


def _arrays(choice: SampledToken) -> list[mx.array]:
    extra = [] if choice.logprob is None else [choice.logprob]
    return [choice.token, *extra, *(choice.top or ())]


def _numbers(choice: SampledToken) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    logprob = None if choice.logprob is None else float(choice.logprob.item().real)
    if choice.top is None:
        return logprob, ()
    tokens: Any = choice.top[0].tolist()
    values: Any = choice.top[1].tolist()
    return logprob, tuple(zip(tokens, values, strict=True))
