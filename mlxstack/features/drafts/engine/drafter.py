"""Draft tokens of one row, from grammar, text or a model."""

from collections.abc import Sequence
from enum import Enum, auto

from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.features.drafts.engine.ngram_index import NgramIndex
from mlxstack.features.drafts.policy import draft_model_governor
from mlxstack.features.drafts.policy.ngram_draft_governor import (
    TRUSTED,
    DraftOffer,
    DraftRecord,
    compared,
    verified,
)


class DraftSource(Enum):
    """Origin of a draft."""

    COPIED = auto()
    FORCED = auto()
    """Draft tokens forced by the grammar."""
    MODEL = auto()


NO_OFFER = DraftOffer()


class Drafter:
    """Drafter of one request; no draft holds a token of `eos`.

    `prediction` is a further text to copy from, as `NgramIndex` takes it.
    """

    def __init__(
        self, prompt: Sequence[int], eos: frozenset[int], prediction: Sequence[int] = ()
    ) -> None:
        self._index = NgramIndex(prompt, prediction)
        self._eos = eos
        self._copied = DraftRecord()
        self._forced = TRUSTED
        self._proposed: tuple[int, ...] = ()
        self.source = DraftSource.COPIED
        """Origin of the proposed draft."""
        self.model_rate: float | None = None
        """Rate of acceptance of a draft model's tokens; None before there were any."""
        self.lead_s = 0.0
        """Seconds that drafts have saved the row so far, and by which others may delay it."""
        self.n_proposed = 0
        self.n_accepted = 0

    def expected(self, is_ruled: bool) -> DraftOffer:
        """Draft after the most likely token in flight."""
        record = self._forced if is_ruled else self._copied
        if record.is_paused or not (is_ruled or self._index.continuation(1)):
            return NO_OFFER
        return DraftOffer(record.width, record.rate)

    def propose(self, forced: Sequence[int], most: int) -> DraftOffer:
        """Prepare a draft of at most `most` tokens for the governor."""
        if forced:
            record = self._forced
            self.source = DraftSource.FORCED
            self._proposed = self._before_eos(forced[: min(most, record.width)])
        else:
            record = self._copied
            if record.is_paused:
                return NO_OFFER
            self.source = DraftSource.COPIED
            tokens = self._index.continuation(min(most, record.width))
            self._proposed = self._before_eos(tokens)
        if record.is_paused:
            return NO_OFFER
        return DraftOffer(len(self._proposed), record.rate)

    def use_model(self, tokens: Sequence[int], prior: float) -> int:
        """Propose tokens of a draft model; returns the number kept.

        In other requests its tokens are accepted at the rate `prior`.
        """
        if self.model_rate is None:
            self.model_rate = prior
        self._proposed = self._before_eos(tokens)
        self.source = DraftSource.MODEL
        return len(self._proposed)

    def take(self, n_tokens: int) -> tuple[int, ...]:
        """The first `n_tokens` of the proposed draft."""
        return self._proposed[:n_tokens]

    def observe(self, tokens: Sequence[int]) -> None:
        """As `ProposalSource.observe`."""
        self.settle(tokens, 0)

    def settle(self, tokens: Sequence[int], n_drafted: int) -> None:
        """Learn the tokens of a pass with `n_drafted` draft tokens."""
        proposed = self._proposed
        source = self.source
        self._proposed = ()
        self.source = DraftSource.COPIED
        if source is DraftSource.FORCED:
            self._forced = _judged(self._forced, proposed, tokens, n_drafted)
        else:
            n_copied = n_drafted if source is DraftSource.COPIED else 0
            copied = self._index.continuation(max(1, n_copied))
            self._copied = _judged(self._copied, copied, tokens, n_copied)
        if n_drafted:
            self.n_proposed += n_drafted
            self.n_accepted += len(tokens) - 1
        if n_drafted and self.model_rate is not None and source is DraftSource.MODEL:
            self.model_rate = draft_model_governor.verified(
                self.model_rate, n_drafted, len(tokens) - 1
            )
        for token in tokens:
            self._index.append(token)

    def _before_eos(self, tokens: Sequence[int]) -> tuple[int, ...]:
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tuple(tokens[:end])


def drafter_of(row: BatchRow) -> Drafter | None:
    """The drafter of a row, if it has one."""
    source = row.proposal_source
    return source if isinstance(source, Drafter) else None


def _judged(
    record: DraftRecord, proposed: Sequence[int], tokens: Sequence[int], n_drafted: int
) -> DraftRecord:
    if n_drafted:
        return verified(record, n_drafted, len(tokens) - 1)
    if proposed:
        return compared(record, proposed[0] == tokens[0])
    return record
