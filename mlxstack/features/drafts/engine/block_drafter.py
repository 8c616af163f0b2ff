"""Draft tokens of a DFlash or DFlash2 drafter.

Its context is the outputs of some layers of the target at every position, whatever its tokens are.
They come from the passes of the target, so they are noted where prompts are computed and tokens
are chosen. KV from the cache brings none: the context begins where the slot's was computed.
"""

import time
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlxstack.engine.decode.batch_row import BatchRow, RowStep
from mlxstack.engine.decode.width_costs import N_PASSES, WIDTHS
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.features.drafts.engine.block_model import BlockModel
from mlxstack.features.drafts.engine.draft_model import DraftModel
from mlxstack.features.drafts.engine.layer_taps import LayerTaps
from mlxstack.features.drafts.policy.draft_model_governor import DraftModelRecord
from mlxstack.policy.pass_layout import WidthCosts

MAX_BEHIND = 64
"""Positions that may wait for the next draft; more are computed."""


class BlockContext:
    """Positions of a slot in the drafter's caches, then in `behind`.

    They are consecutive from `start` on.
    """

    def __init__(self, model: BlockModel, start: int) -> None:
        self._model = model
        self.caches = model.new_caches()
        self.start = start
        self.behind: list[mx.array] = []
        """Features (n, width) that wait."""

    @property
    def n_held(self) -> int:
        """Positions in the caches."""
        return int(self.caches[0].offset)

    @property
    def n_behind(self) -> int:
        """Positions that wait."""
        return sum(len(features) for features in self.behind)

    @property
    def end(self) -> int:
        """The first position that is not known."""
        return self.start + self.n_held + self.n_behind

    @property
    def n_bytes(self) -> int:
        """Bytes of the caches and of the features that wait."""
        held: int = sum(cache.nbytes for cache in self.caches)
        return held + sum(features.nbytes for features in self.behind)

    def rewind(self, position: int) -> None:
        """Drop what follows the first `position` tokens."""
        n_dropped = min(self.end - max(position, self.start), self.end - self.start)
        while n_dropped > 0 and self.behind:
            last = self.behind.pop()
            if len(last) > n_dropped:
                self.behind.append(last[: len(last) - n_dropped])
            n_dropped -= len(last)
        if n_dropped > 0:
            for cache in self.caches:
                cache.trim(n_dropped)

    def hold(self) -> None:
        """Compute the positions that wait."""
        if self.behind:
            self._model.extend(self.caches, mx.concatenate(self.behind))
            self.behind = []

    def detach(self) -> None:
        """Nothing to do: no step in flight uses its caches."""


class BlockDrafter(DraftModel):
    """Drafts by blocks; `taps` are those of the target."""

    def __init__(self, name: str, model: BlockModel, taps: LayerTaps, n_vocab: int) -> None:
        self._model = model
        self._taps = taps
        self.target = taps.parts
        record = DraftModelRecord(
            _measured(model, n_vocab), start_s=0.0, most=model.block_size - 1, is_block=True
        )
        super().__init__(name, record, model.bytes_per_token, n_vocab)
        self.bytes_beside = self.bytes_per_token

    def observe(self, taken: RowStep, tokens: Sequence[int]) -> None:
        """Note the features of a row's accepted tokens."""
        if self.is_broken or taken.states is None:
            return
        context = taken.row.context
        known = self._ending_at(context, taken.position)
        known.behind.append(self._taps.taken(taken.states[: len(tokens)]))
        if known.n_behind > MAX_BEHIND:
            self._compute(context, known)

    def observe_prefill(
        self, context: SlotContext, start: int, states: mx.array, tokens: Sequence[int]
    ) -> None:
        """Compute the positions of a prefill chunk."""
        if self.is_broken:
            return
        known = self._ending_at(context, start)
        known.behind.append(self._taps.taken(states))
        self._compute(context, known)

    def _is_ready(self, row: BatchRow) -> bool:
        known = row.context.companion
        n_known = len(row.context) + len(row.known)
        return isinstance(known, BlockContext) and known.start < known.end == n_known - 1

    def _draft(self, rows: Sequence[BatchRow], n_tokens: int) -> tuple[list[list[int]], list[int]]:
        contexts = [cast(BlockContext, row.context.companion) for row in rows]
        for known in contexts:
            known.hold()
        tokens = self._text([row.known[-1] for row in rows])
        caches = [known.caches for known in contexts]
        drafts = self._model.draft(tokens, caches, n_tokens, self._n_vocab)
        return drafts.tolist(), [len(rows) * (1 + n_tokens)]  # type: ignore[return-value]

    def _compute(self, context: SlotContext, known: BlockContext) -> None:
        try:
            known.hold()
            mx.eval([(cache.keys, cache.values) for cache in known.caches])
        except Exception as error:  # the target model goes on without drafts
            self.fail(error, [context])

    def _ending_at(self, context: SlotContext, position: int) -> BlockContext:
        """Context that ends at `position`; it starts over after a gap."""
        known = context.companion
        if not isinstance(known, BlockContext) or known.end != position:
            context.companion = known = BlockContext(self._model, position)
        return known


def _measured(model: BlockModel, n_vocab: int) -> WidthCosts:
    """Seconds of passes by width: tokens of the blocks of all rows."""
    widths = WIDTHS[1:]
    return WidthCosts(widths, tuple(_seconds(model, n_vocab, width) for width in widths))


def _seconds(model: BlockModel, n_vocab: int, width: int) -> float:
    length = min(width, model.block_size)
    known = model.new_caches()
    model.extend(known, mx.zeros((1, model.features_width)))
    rows = [known] * (width // length)
    taken = []
    for _ in range(N_PASSES):
        began = time.perf_counter()
        mx.eval(model.draft([0] * len(rows), rows, length - 1, n_vocab))
        taken.append(time.perf_counter() - began)
    return min(taken)
