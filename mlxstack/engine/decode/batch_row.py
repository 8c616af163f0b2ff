"""Rows of the running batch."""

from collections.abc import Sequence
from math import inf

import mlx.core as mx

from mlxstack.engine.decode.drafter import NO_OFFER, Drafter
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.policy.drafts.ngram_draft_governor import MAX_DRAFTED, DraftOffer


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
        self.draft: tuple[int, ...] = ()
        """Draft tokens of the step that was built last."""
        self.is_at_prompt = True
        """Whether `pending` is the last token of the prompt."""

    def expected(self) -> DraftOffer:
        """Draft that may be possible once the token in flight is known."""
        if self.drafter:
            return self.drafter.expected(self.sampler.is_ruled)
        return NO_OFFER

    @property
    def known(self) -> list[int]:
        """The known tokens that the next pass feeds."""
        if self.pending is None:
            return self.replay
        return [*self.replay, self.pending]

    @property
    def tokens(self) -> mx.array:
        """The tokens (n,) that this row feeds."""
        if self.replay or self.draft:
            return mx.array([*self.known, *self.draft])
        return self.input_token

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
        most = min(self.n_left, due if due > 0 else inf, MAX_DRAFTED + 1) - 1
        return 0 if self.replay else int(most)

    def extend(self, tokens: Sequence[int]) -> None:
        """The caches hold these known tokens now."""
        self.context.extend(tokens)
        self.pending = None
        self.replay = []
