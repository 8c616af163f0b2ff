"""Proposers: tokens that may come next, which the sampler verifies."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from mlxstack.core.request import Request
from mlxstack.engine.decode.batch_row import BatchRow, ProposalSource, RowStep
from mlxstack.engine.kv.slot_context import SlotContext


class Proposer(Protocol):
    """Proposes tokens for the rows of a batch. MLX thread only."""

    @property
    def is_active(self) -> bool:
        """Whether it may propose anything."""

    @property
    def needs_states(self) -> bool:
        """Whether it is given the last hidden states of all passes."""

    @property
    def model_name(self) -> str | None:
        """Name of its model; None without one, or after a failure."""

    @property
    def plain_share(self) -> float:
        """Share of the last step's seconds that it takes without proposals."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Its part of `Counters`, by field."""

    def start(self, request: Request, text: Sequence[int]) -> ProposalSource | None:
        """Source of a new row; `text` is the text of its prompt."""

    def propose(
        self, rows: Sequence[BatchRow], *, is_prefilling: bool
    ) -> list[tuple[BatchRow, Exception]]:
        """Set the `proposed` tokens of rows; returns those whose rules raised.

        Their last tokens are known. With `is_prefilling` a prefill chunk follows the step.
        """

    def expects(self, rows: Sequence[BatchRow]) -> bool:
        """Whether it is likely to propose after the tokens in flight."""

    def settle(
        self,
        step: Sequence[RowStep],
        outcomes: Sequence[Sequence[int] | None],
        seconds: float | None,
    ) -> None:
        """Learn from a step, its sampled tokens and, where measured, seconds.

        Of each row they are the accepted tokens and one more; None for a row that has left.
        """

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """Note a chunk: states (n, dim) from `start` on, tokens (n + 1)."""


class NoProposals:
    """Proposes nothing: one token per row and step."""

    is_active = False
    needs_states = False
    model_name = None
    plain_share = 1.0
    counters: Mapping[str, int] = {}

    def start(self, request: Request, text: Sequence[int]) -> None:
        """No source."""

    def propose(
        self, rows: Sequence[BatchRow], *, is_prefilling: bool
    ) -> list[tuple[BatchRow, Exception]]:
        """No tokens."""
        return []

    def expects(self, rows: Sequence[BatchRow]) -> bool:
        """Never."""
        return False

    def settle(
        self,
        step: Sequence[RowStep],
        outcomes: Sequence[Sequence[int] | None],
        seconds: float | None,
    ) -> None:
        """Nothing to learn."""

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """Nothing to take."""


NO_PROPOSALS = NoProposals()
