"""Chunked prefill: size and order of prefill chunks, bounded by inter-token latency."""

import math
from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.request import Priority
from mlxstack.policy.scheduler_state import Slot
from mlxstack.policy.throughput_model import ThroughputModel, tokens_within

FINEST = 16
"""Chunks shorter than a block end on multiples of this, in tokens."""

HEADROOM = 0.9
"""Share of the bound that is aimed at: the next step may have one row more than the last."""


class PrefillPolicy(Struct, frozen=True):
    """Bounds of a prefill chunk.

    `max_stall_s` is the longest pause between tokens of a decoding request; `patience_s` the
    longest chunk while no request decodes, so that arrivals and cancellations are handled;
    `max_chunk_size` and `block` are tokens; `max_passed` is the number of chunks in a row that may
    pass over the oldest prompt. `score_bytes` is what unfused attention stores per query token and
    context token, of which `max_score_bytes` may be alive; 0: fused, no bound.
    """

    max_stall_s: float = 0.25
    patience_s: float = 1.0
    max_chunk_size: int = 2048
    block: int = 128
    max_passed: int = 3
    score_bytes: int = 0
    max_score_bytes: int = 0


def next_to_prefill(slots: Sequence[Slot], pace: PrefillPolicy) -> Slot:
    """Select the slot with the highest priority, then the shortest remaining prompt.

    The oldest prompt gets one chunk of `max_passed + 1`, so every prompt ends.
    """
    first = min(slots, key=_arrival)
    if first.n_passed >= pace.max_passed:
        return first
    return min(slots, key=lambda s: (_priority(s), s.n_left, _arrival(s)))


def chunk_size(slot: Slot, n_decoding: int, speed: ThroughputModel, pace: PrefillPolicy) -> int:
    """Tokens of the next prefill chunk, ending on a block boundary where one is near.

    While other requests decode, chunk plus decode step stay inside `max_stall_s` at the measured
    throughput.
    """
    budget = _budget(slot, n_decoding, speed, pace)
    if slot.n_left <= budget:
        return slot.n_left
    end = slot.position + budget
    aligned = end - end % pace.block
    if aligned <= slot.position:
        aligned = end - end % FINEST
    return aligned - slot.position


def _budget(slot: Slot, n_decoding: int, speed: ThroughputModel, pace: PrefillPolicy) -> int:
    most = tokens_within_scores(slot.position, pace)
    if speed.prefill_tps == 0:
        return min(pace.block, most)
    stall = HEADROOM * pace.max_stall_s - speed.decode_s
    seconds = stall if n_decoding else pace.patience_s
    return max(FINEST, min(most, tokens_within(speed, slot.position, seconds)))


def tokens_within_scores(position: int, pace: PrefillPolicy) -> int:
    """Tokens from `position` on whose attention scores stay within `max_score_bytes`."""
    if not pace.score_bytes:
        return pace.max_chunk_size
    pairs = pace.max_score_bytes / pace.score_bytes
    n_tokens = int((math.sqrt(position * position + 4 * pairs) - position) / 2)
    return max(FINEST, min(pace.max_chunk_size, n_tokens))


def _priority(slot: Slot) -> int:
    return slot.queued.priority if slot.queued else Priority.NORMAL


def _arrival(slot: Slot) -> tuple[float, int]:
    return slot.queued.arrived if slot.queued else 0.0, slot.id
