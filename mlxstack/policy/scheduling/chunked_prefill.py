"""Chunked prefill: size and order of chunks, bounded by inter-token latency.

The size follows a throughput model that is fitted to measured chunks and decode steps.
"""

import math
from collections.abc import Iterable, Sequence
from operator import truediv

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import NonNegativeInt, PositiveInt, Seconds
from mlxstack.core.request import Priority, TurnKind
from mlxstack.policy.scheduling.scheduler_state import Slot, SlotState

MIN_TOKENS = 16
"""Shorter chunks, in tokens, measure overhead rather than throughput."""

MEMORY = 0.95
"""Decay of older chunks in the regression of the slowdown."""


class RegressionSums(Struct, frozen=True):
    """Decaying regression sums over chunks: tokens, positions, costs, products."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


class ThroughputModel(Struct, frozen=True):
    """Measured prefill tokens per second at position 0; seconds per step.

    Each token before a token makes it slower by the share `slowdown`: attention looks back at
    all of them. 0: not known yet.
    """

    prefill_tps: float = 0.0
    decode_s: float = 0.0
    slowdown: float = 0.0
    trend: RegressionSums = RegressionSums()
    n_largest: int = 0
    """Tokens of the longest chunk that was measured."""


def observe_prefill(
    speed: ThroughputModel, start: int, n_tokens: int, seconds: float
) -> ThroughputModel:
    """Update by a chunk; level follows at once, slowdown gradually."""
    if n_tokens < MIN_TOKENS or seconds <= 0:
        return speed
    middle = start + n_tokens / 2
    trend = _add(speed.trend, n_tokens, middle, seconds / n_tokens)
    slowdown = _slowdown(trend)
    measured = n_tokens / seconds
    expected = speed.prefill_tps / (1 + speed.slowdown * middle) or measured
    level = 0.5 * (measured + expected) * (1 + slowdown * middle)
    n_largest = max(speed.n_largest, n_tokens)
    return ThroughputModel(level, speed.decode_s, slowdown, trend, n_largest)


def observe_decode(speed: ThroughputModel, seconds: float) -> ThroughputModel:
    """Update by a decode step: slower at once, faster gradually."""
    decode_s = max(seconds, 0.8 * speed.decode_s + 0.2 * seconds)
    return replace(speed, decode_s=decode_s)


def prefill_s(speed: ThroughputModel, start: int, n_tokens: int) -> float:
    """Prefill seconds of `n_tokens` from position `start`; 0 if unknown."""
    if not speed.prefill_tps:
        return 0.0
    return n_tokens * (1 + speed.slowdown * (start + n_tokens / 2)) / speed.prefill_tps


def tokens_within(speed: ThroughputModel, start: int, seconds: float) -> int:
    """Number of tokens from position `start` on that take `seconds`: `prefill_s` solved."""
    work = max(0.0, seconds) * speed.prefill_tps
    first = 1 + speed.slowdown * start
    return int(2 * work / (first + math.sqrt(first * first + 2 * speed.slowdown * work)))


def _add(trend: RegressionSums, n: int, x: float, y: float) -> RegressionSums:
    return RegressionSums(
        MEMORY * trend.n + n,
        MEMORY * trend.x + n * x,
        MEMORY * trend.y + n * y,
        MEMORY * trend.xx + n * x * x,
        MEMORY * trend.xy + n * x * y,
    )


def _slowdown(trend: RegressionSums) -> float:
    """Slope over intercept of the least-squares line; 0 for clustered chunks."""
    x = trend.x / trend.n
    y = trend.y / trend.n
    spread = trend.xx / trend.n - x * x
    if spread < MIN_TOKENS * MIN_TOKENS:
        return 0.0
    slope = max(0.0, (trend.xy / trend.n - x * y) / spread)
    return slope / max(y - slope * x, 0.1 * y)


FINEST = 16
"""Chunks shorter than a block end on multiples of this, in tokens."""

GROWTH = 2
"""A chunk beside decoding requests is at most so many times as long as any that was measured."""

HEADROOM = 0.9
"""Target share of the bound; the next step may have another row."""

DRAFT_SHARE = 0.05
"""Share of the seconds of a prefill chunk by which drafts may prolong the decode step beside it."""


ROW_SHARE = 0.03
"""Share of a chunk that is left for the longer decode step after it, for each prompt beside."""

MAX_PADDED = 2
"""A prompt that is padded in a shared pass gets so many times its length at most."""

TOGETHER_S = 2.0
"""Longest prefill, in seconds, of a prompt for which computed requests wait."""


PERSON_SHARE = 0.9
"""Minimum share of a step for the prompt of a person, while all that decode give way."""


class PrefillPolicy(Struct, frozen=True):
    """Bounds of a prefill chunk.

    `max_stall_s` is the longest pause between tokens of a decoding request; `patience_s` the
    longest chunk while no request decodes, so that arrivals and cancellations are handled;
    `max_chunk_size` and `block` are tokens; `max_passed` is the number of chunks in a row that may
    pass over the oldest prompt, `max_passed_unattended` where a person waits for them and not for
    it. `score_bytes` is what unfused attention stores per query token and context token, of which
    `max_score_bytes` may be alive; 0: fused, no bound. Chunks of `fused_from` tokens or more are
    fused too; 0: none. With `is_forced` all are, by kernels that MLX passes over: no bound while
    these run. Prompts of which at most `max_shared` tokens are left share a pass; 0: none do. With
    `is_padded` each of them takes as long as the longest.
    """

    max_stall_s: Seconds = 0.25
    patience_s: Seconds = 1.0
    max_chunk_size: PositiveInt = 2048
    block: PositiveInt = 128
    max_passed: NonNegativeInt = 3
    max_passed_unattended: NonNegativeInt = 15
    score_bytes: NonNegativeInt = 0
    max_score_bytes: NonNegativeInt = 0
    fused_from: NonNegativeInt = 0
    is_forced: bool = False
    max_shared: NonNegativeInt = 0
    is_padded: bool = False


def next_to_prefill(slots: Sequence[Slot], policy: PrefillPolicy) -> Slot:
    """Select the slot with the highest priority, then the shortest remaining prompt.

    The oldest prompt gets one chunk of `max_passed + 1`, so every prompt ends. The oldest of those
    that give way to a person's gets one of `max_passed_unattended + 1`.
    """
    passed = [slot for slot in slots if _gives_way(slot, slots)]
    if passed:
        oldest = min(passed, key=_arrival)
        if oldest.n_passed >= policy.max_passed_unattended:
            return oldest
        slots = [slot for slot in slots if slot not in passed]
    first = min(slots, key=_arrival)
    if first.n_passed >= policy.max_passed:
        return first
    return min(slots, key=lambda s: (_priority(s), s.n_left, _arrival(s)))


def is_person_first(slot: Slot, decoding: Sequence[Slot]) -> bool:
    """Whether all that decode give way to this prompt of a person."""
    return bool(decoding) and all(_gives_way(other, [slot]) for other in decoding)


def _gives_way(slot: Slot, others: Iterable[Slot]) -> bool:
    """Whether it is unattended, beside an attended one of higher priority."""
    return not _is_attended(slot) and any(
        _is_attended(other) and _priority(other) < _priority(slot) for other in others
    )


def _is_attended(slot: Slot) -> bool:
    return slot.request is None or slot.request.caller.turn_kind is TurnKind.PERSON


def awaited(slots: Sequence[Slot], speed: ThroughputModel, policy: PrefillPolicy) -> list[Slot]:
    """Prefilling slots for which computed requests wait before they begin to decode.

    None of these has a token yet. Once one has, a step within the bound has a decode step and the
    fixed cost of a second pass, about as much, beside the tokens of its chunk. Where both take half
    of the step, prompts take twice as long: first tokens come sooner on average if they all wait.
    """
    computed = [slot for slot in slots if slot.state is SlotState.RUNNING]
    is_slow = 4 * speed.decode_s > HEADROOM * policy.max_stall_s
    if not (is_slow and computed) or any(slot.has_token for slot in computed):
        return []
    first = min(map(_priority, computed))
    return [
        slot
        for slot in slots
        if slot.state is SlotState.PREFILLING
        and _priority(slot) <= first
        and prefill_s(speed, slot.position, slot.n_left) <= TOGETHER_S
        and not _has_images_left(slot)
    ]


def _has_images_left(slot: Slot) -> bool:
    """Whether images follow, whose decoding and tower the speed of prefill does not tell."""
    if slot.request is None:
        return False
    return any(slot.position < image.end for image in slot.request.images)


def chunk_size(
    slot: Slot,
    n_decoding: int,
    speed: ThroughputModel,
    policy: PrefillPolicy,
    *,
    is_first: bool = False,
) -> int:
    """Tokens of the next prefill chunk, preferably to a block boundary.

    While other requests decode, chunk plus decode step stay inside `max_stall_s` at the measured
    throughput, which says little about far longer chunks. The prompt of a person that `is_first`
    gets `PERSON_SHARE` of the step, up to `patience_s`, where that is more. Where that permits
    `fused_from` tokens, no chunk is shorter, the last one included if the one before it can give
    way.
    """
    seconds = _chunk_s(n_decoding, speed, policy, is_first=is_first)
    budget = _budget(slot, n_decoding, seconds, speed, policy)
    if slot.n_left <= budget:
        return slot.n_left
    end = slot.position + budget
    aligned = end - end % policy.block
    if aligned <= slot.position:
        aligned = end - end % FINEST
    n_tokens = aligned - slot.position
    if policy.is_forced or not 0 < policy.fused_from <= budget:
        return n_tokens
    n_before_last = slot.n_left - policy.fused_from
    n_tokens = max(n_tokens, policy.fused_from)
    if policy.fused_from <= n_before_last < n_tokens:
        return n_before_last
    return n_tokens


def sharing(
    slots: Sequence[Slot],
    first: Slot,
    n_decoding: int,
    speed: ThroughputModel,
    policy: PrefillPolicy,
) -> list[Slot]:
    """Prompts that end in the pass of the `first`, in their order.

    Each takes its part of the tokens that a chunk of it could have. None is less urgent than the
    first, whose token waits for all of them, and none is passed over.
    """
    seconds = _chunk_s(n_decoding, speed, policy)
    others = [s for s in slots if s.id != first.id and _priority(s) <= _priority(first)]
    together = [first]
    while others:
        slot = next_to_prefill(others, policy)
        others.remove(slot)
        longest = max(slot.n_left, *(s.n_left for s in together))
        if longest > _longest_beside([*together, slot], policy):
            break
        counts = [longest if policy.is_padded else s.n_left for s in (*together, slot)]
        budgets = [_budget(s, n_decoding, seconds, speed, policy) for s in (*together, slot)]
        for_rows = ROW_SHARE * len(together) if n_decoding else 0.0
        if sum(map(truediv, counts, budgets)) > 1 - for_rows:
            break
        together.append(slot)
    return together[1:]


def _longest_beside(slots: Sequence[Slot], policy: PrefillPolicy) -> int:
    """Maximum length, in tokens, of these prompts to share a pass."""
    if any(slot.request and slot.request.images for slot in slots):
        return 0
    if policy.is_padded:
        return min(policy.max_shared, MAX_PADDED * min(slot.n_left for slot in slots))
    return policy.max_shared


def _chunk_s(
    n_decoding: int, speed: ThroughputModel, policy: PrefillPolicy, *, is_first: bool = False
) -> float:
    """Seconds of the next chunk at most."""
    if not n_decoding:
        return policy.patience_s
    seconds = stall_left(speed, policy)
    if is_first:
        return max(seconds, min(policy.patience_s, _person_s(speed)))
    return seconds


def _person_s(speed: ThroughputModel) -> float:
    """Seconds of a chunk that has `PERSON_SHARE` of its step."""
    return speed.decode_s * PERSON_SHARE / (1 - PERSON_SHARE)


def _budget(
    slot: Slot, n_decoding: int, seconds: float, speed: ThroughputModel, policy: PrefillPolicy
) -> int:
    n_tokens = _tokens_in_time(slot, n_decoding, seconds, speed, policy)
    if 0 < policy.fused_from <= min(n_tokens, slot.n_left):
        return n_tokens
    return min(n_tokens, tokens_within_scores(slot.position, policy))


def _tokens_in_time(
    slot: Slot, n_decoding: int, seconds: float, speed: ThroughputModel, policy: PrefillPolicy
) -> int:
    most = policy.max_chunk_size
    if speed.prefill_tps == 0:
        return min(policy.block, most)
    if n_decoding:
        most = min(most, GROWTH * max(policy.block, speed.n_largest))
    return max(FINEST, min(most, tokens_within(speed, slot.position, seconds)))


def stall_left(speed: ThroughputModel, policy: PrefillPolicy) -> float:
    """Seconds that the bound on stalls leaves beside a decode step."""
    return HEADROOM * policy.max_stall_s - speed.decode_s


def steps_within(seconds: float, step_s: float) -> int:
    """Steps of a vision tower that take `seconds`, one at least.

    `step_s` is 0 before one was measured.
    """
    if not step_s:
        return 1
    return max(1, int(seconds / step_s))


def draft_bound(
    plain_s: float, n_rows: int, policy: PrefillPolicy, *, is_prefilling: bool = False
) -> float:
    """Maximum seconds of a decode step with drafts; without, it takes `plain_s`.

    Beside a prefill chunk they take a share of its seconds, out of the headroom of the bound: its
    size stays. Several rows stay within the bound on stalls, and a row alone delays an arrival by
    it at most.
    """
    bound_s = HEADROOM * policy.max_stall_s
    if is_prefilling:
        return plain_s + DRAFT_SHARE * max(0.0, bound_s - plain_s)
    if n_rows > 1:
        return max(bound_s, plain_s)
    return plain_s + bound_s


def tokens_within_scores(position: int, policy: PrefillPolicy) -> int:
    """Tokens from `position` whose attention scores fit `max_score_bytes`."""
    if policy.is_forced or not policy.score_bytes:
        return policy.max_chunk_size
    pairs = policy.max_score_bytes / policy.score_bytes
    n_tokens = int((math.sqrt(position * position + 4 * pairs) - position) / 2)
    return max(FINEST, min(policy.max_chunk_size, n_tokens))


def _priority(slot: Slot) -> int:
    if slot.request:
        return slot.request.priority
    return Priority.NORMAL


def _arrival(slot: Slot) -> tuple[float, int]:
    return slot.request.arrived if slot.request else 0.0, slot.id
