"""Draft tokens of one row: those that its grammar forces, or those that followed before."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.engine.decode.ngram_index import FindPlace, NgramIndex
from mlxstack.policy.draft_governor import (
    TRUSTED,
    DraftOffer,
    DraftRecord,
    compared,
    verified,
)


class Draft(Struct, frozen=True):
    """Tokens that may come next, and whether the grammar forces them."""

    tokens: tuple[int, ...] = ()
    is_forced: bool = False


NO_DRAFT, NO_OFFER = Draft(), DraftOffer()


class Drafter:
    """Proposes tokens for one request and learns how they fare. No draft holds a token of `eos`.

    `prediction` and `find_sibling` are further texts to copy from, as `NgramIndex` takes them.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        eos: frozenset[int],
        prediction: Sequence[int] = (),
        find_sibling: FindPlace | None = None,
    ) -> None:
        self._index = NgramIndex(prompt, prediction, find_sibling)
        self._eos = eos
        self._copied, self._forced = DraftRecord(), TRUSTED
        self._proposed = NO_DRAFT
        self.n_drafted = 0
        self.n_accepted = 0

    def expected(self, is_ruled: bool) -> DraftOffer:
        """A draft that the token in flight is likely to lead to, unless it is the wrong one."""
        record = self._forced if is_ruled else self._copied
        if record.is_paused or not (is_ruled or self._index.continuation(1)):
            return NO_OFFER
        return DraftOffer(record.width, record.rate)

    def propose(self, forced: Sequence[int], most: int) -> DraftOffer:
        """Prepare a draft of at most `most` tokens for the next pass: what the governor weighs."""
        record = self._forced if forced else self._copied
        if record.is_paused and not forced:
            return NO_OFFER
        most = min(most, record.width)
        tokens = list(forced[:most]) if forced else self._index.continuation(most)
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        self._proposed = Draft(tuple(tokens[:end]), bool(forced))
        return NO_OFFER if record.is_paused else DraftOffer(end, record.rate)

    def take(self, n_tokens: int) -> tuple[int, ...]:
        """The first `n_tokens` of the proposed draft."""
        return self._proposed.tokens[:n_tokens]

    def settle(self, tokens: Sequence[int], n_drafted: int = 0) -> None:
        """Learn the tokens of a pass into which `n_drafted` of the proposed ones went."""
        proposed, self._proposed = self._proposed, NO_DRAFT
        if proposed.is_forced:
            self._forced = _judged(self._forced, proposed.tokens, tokens, n_drafted)
        else:
            copied = self._index.continuation(max(1, n_drafted))
            self._copied = _judged(self._copied, copied, tokens, n_drafted)
        if n_drafted:
            self.n_drafted += n_drafted
            self.n_accepted += len(tokens) - 1
        for token in tokens:
            self._index.append(token)


def _judged(
    record: DraftRecord, proposed: Sequence[int], tokens: Sequence[int], n_drafted: int
) -> DraftRecord:
    if n_drafted:
        return verified(record, n_drafted, len(tokens) - 1)
    if proposed:
        return compared(record, proposed[0] == tokens[0])
    return record
