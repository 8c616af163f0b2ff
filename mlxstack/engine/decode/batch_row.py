"""Rows of the running batch, and what they do in one step."""

import sys
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from msgspec import Struct

from mlxstack.engine.decode.sampler import Choice, Sampler
from mlxstack.engine.kv.slot_context import SlotContext


class ProposalSource(Protocol):
    """Source of the proposed tokens of one row."""

    n_proposed: int
    n_accepted: int

    def observe(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, none of which was proposed."""


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
        n_left: int = sys.maxsize,
        proposal_source: ProposalSource | None = None,
        shift: int = 0,
        request: str = "",
    ) -> None:
        self.slot = slot
        self.request = request
        self.shift = shift
        self.n_left = n_left
        self.context = context
        self.sampler = sampler
        self.proposal_source = proposal_source
        self.input_token = mx.array([last])
        self.pending: int | None = last
        """The token of `input_token` once its value is known; it enters the context when fed."""
        self.rolled_back: list[int] = []
        """Tokens before it that a rollback took out of recurrent state."""
        self.proposed: tuple[int, ...] = ()
        """Proposed tokens of the step that was built last."""
        self.is_at_prompt = True
        """Whether `pending` is the last token of the prompt."""

    @property
    def known(self) -> list[int]:
        """The known tokens that the next pass feeds."""
        if self.pending is None:
            return self.rolled_back
        return [*self.rolled_back, self.pending]

    @property
    def tokens(self) -> mx.array:
        """The tokens (n,) that this row feeds."""
        if self.rolled_back or self.proposed:
            return mx.array([*self.known, *self.proposed])
        return self.input_token

    @property
    def max_proposed(self) -> int:
        """Maximum of proposed tokens in the next pass; 0 after a rollback.

        KV is quantized between passes, so they end at the latest where that is due.
        """
        if self.rolled_back:
            return 0
        n_plain = self.context.quantized_start - len(self.context)
        if n_plain > 0:
            return min(self.n_left, n_plain) - 1
        return self.n_left - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """The caches hold these known tokens now."""
        self.context.extend(tokens)
        self.pending = None
        self.rolled_back = []

    def choose(self, choice: Choice, n_sampled: int = 1) -> None:
        """Feed this choice next, the last of `n_sampled` tokens."""
        self.input_token = choice.token
        self.n_left -= n_sampled

    def settle(self, choices: Sequence[Choice], tokens: Sequence[int]) -> None:
        """Keep the accepted `tokens`; the caches drop the refused ones."""
        fed = [*self.known, *tokens[:-1]]
        is_kept = self.context.end_proposal(*fed)
        self.pending = None
        self.rolled_back = [] if is_kept else fed
        if tokens:
            accepted = choices[: len(tokens)]
            self.sampler.accept([choice.token for choice in accepted], len(self.proposed))
            self.pending = tokens[-1]
            self.choose(accepted[-1], len(tokens))


class RowStep(Struct, frozen=True):
    """One row in a step that was built."""

    row: BatchRow
    choices: tuple[Choice, ...]
    """Of its next token, and after each proposed one; none where its rules raised."""
    position: int
    """Position of the token before the first choice."""
    n_fed: int
    """Tokens that it brought to the pass."""
    states: mx.array | None = None
    """Last hidden states (1 + proposed, dim) from `position` on, where a proposer needs them."""
