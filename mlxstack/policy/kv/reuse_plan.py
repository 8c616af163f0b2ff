"""Reuse plan: longest prefix of a prompt that every layer can rebuild.

Layers that keep every token can be cut anywhere; the others exist only at checkpoints, or where
a live context stands. The longest position wins, ties go to the cheapest source, and at least
one token of the prompt is left to compute. No plan ends inside an image.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.prompt_tokens import ImageSpan, reuse_cut
from mlxstack.policy.kv.prefix_index import PathStep, PrefixMatch, RestorePoint, cut_path

COST = {KVSource.SLOT: 0, KVSource.FORK: 1, KVSource.PARKED: 2, KVSource.DISK: 3, KVSource.NONE: 4}


class ReuseSource(Struct, frozen=True):
    """Restore source that shares the first `covered` tokens of the prompt.

    Positions in [`free_from`, covered] need no checkpoint: 0 when all layers can be cut, None
    when none can, between them for a live window that has not yet wrapped. `states` are usable
    beside them. `slot` for live contexts, `path` for parked and stored ones.
    """

    source: KVSource
    covered: int
    free_from: int | None = 0
    states: tuple[RestorePoint, ...] = ()
    slot: int | None = None
    path: tuple[PathStep, ...] = ()


class ReusePlan(Struct, frozen=True):
    """Take `position` tokens from `source`; compute the rest."""

    source: KVSource = KVSource.NONE
    position: int = 0
    slot: int | None = None
    path: tuple[PathStep, ...] = ()
    checkpoint: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The records that it takes."""
        path = tuple(step.key for step in self.path)
        if self.checkpoint is None:
            return path
        return (*path, self.checkpoint)


class MissReason(StrEnum):
    """Reason why less was reused than could have been."""

    COLD = "cold"
    NEW = "new conversation"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    NO_CHECKPOINT = "no checkpoint"
    MODEL = "model changed"
    DISABLED = "disabled"


class MissContext(Struct, frozen=True):
    """Facts about a prompt beside the reuse sources, in tokens.

    `n_previous` is the prompt length of the nearest context whose tokens are known (the agent's
    last one, without its answer, which clients may drop), `n_common` how much of it the prompt
    shares, `n_evicted` how much was known before an eviction. `is_guess`: it may be another
    agent's, since this one's last prompt is not known.
    `is_foreign`: the agent has KV, but of another identity. `is_new`: the first turn of a
    conversation, which shares at most a prefix with others.
    """

    n_prompt: int
    block_size: int = 128
    is_enabled: bool = True
    is_foreign: bool = False
    is_new: bool = False
    n_previous: int = 0
    n_common: int = 0
    is_guess: bool = False
    n_evicted: int = 0


def stored(match: PrefixMatch, is_sliceable: bool) -> tuple[ReuseSource, ...]:
    """Reuse sources in memory alone, and with the disk where longer."""
    n_parked = next((s.start for s in match.path if not s.is_parked), match.covered)
    free_from = 0 if is_sliceable else None
    parked = tuple(checkpoint for checkpoint in match.checkpoints if checkpoint.is_parked)
    return (
        ReuseSource(
            KVSource.PARKED, n_parked, free_from, parked, path=cut_path(match.path, n_parked)
        ),
        ReuseSource(KVSource.DISK, match.covered, free_from, match.checkpoints, path=match.path),
    )


def plan(
    n_prompt: int, options: Sequence[ReuseSource], images: Sequence[ImageSpan] = ()
) -> ReusePlan:
    """Best plan of the options, else NONE. O(options x states).

    `images` are those of the prompt.
    """
    plans = [_best(n_prompt, option, images) for option in options]
    plans = [candidate for candidate in plans if candidate.position]
    return min(plans, key=lambda p: (-p.position, COST[p.source]), default=ReusePlan())


def explain_miss(
    chosen: ReusePlan, options: Sequence[ReuseSource], clues: MissContext
) -> CacheMiss | None:
    """Reason for a smaller reuse than possible; None without a loss.

    When the prompt diverged, and a checkpoint was missing or KV was evicted too, the larger loss is
    named. The last tokens of a known prompt that do not fill a block are no loss.
    """
    position = chosen.position
    limit = max(clues.n_prompt - 1, 0)
    covered = min(max((o.covered for o in options), default=0), limit)
    common = min(clues.n_common, limit)
    previous = min(clues.n_previous, limit)
    n_known = max(common, min(clues.n_evicted, limit))
    # Where more is reused than the prompt shares with a guess, it continues another prompt.
    is_before = clues.is_new or (position < previous and not (clues.is_guess and position > common))
    is_partial_block = position < common < position + clues.block_size
    n_missing = covered - position if is_partial_block else max(covered, n_known) - position
    has_diverged = is_before and 0 < previous - common >= n_missing
    losses = (
        (not clues.is_enabled, CacheMiss(MissReason.DISABLED, n_lost=n_known)),
        (clues.is_foreign and not position, CacheMiss(MissReason.MODEL)),
        (clues.is_new and has_diverged and position, CacheMiss(MissReason.NEW, clues.n_common)),
        (clues.is_new and has_diverged, CacheMiss(MissReason.COLD)),
        (has_diverged, CacheMiss(MissReason.DIVERGED, clues.n_common, n_lost=previous - position)),
        (
            position < covered,
            CacheMiss(MissReason.NO_CHECKPOINT, position, n_lost=covered - position),
        ),
        (is_partial_block, None),
        (position < n_known, CacheMiss(MissReason.EVICTED, position, n_lost=n_known - position)),
        (not position, CacheMiss(MissReason.COLD)),
    )
    return next((miss for is_so, miss in losses if is_so), None)


def _best(n_prompt: int, option: ReuseSource, images: Sequence[ImageSpan]) -> ReusePlan:
    end = min(option.covered, n_prompt - 1)
    usable = [s for s in option.states if s.position <= end]
    if images:
        end = reuse_cut(images, end)
        usable = [s for s in usable if reuse_cut(images, s.position) == s.position <= end]
    best = max(usable, key=lambda s: s.position, default=RestorePoint(0))
    if option.free_from is not None and option.free_from <= end and best.position < end:
        best = RestorePoint(end)
    return ReusePlan(
        source=option.source,
        position=best.position,
        slot=option.slot,
        path=cut_path(option.path, best.position),
        checkpoint=best.checkpoint,
    )
