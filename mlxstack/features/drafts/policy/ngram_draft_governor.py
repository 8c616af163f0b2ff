"""Draft lengths of n-gram and grammar drafts, by row.

A draft token costs what the pass gets wider, and is worth the chance that it is accepted. Rows
are widened in the order of that chance, as far as tokens per second grow, the step stays within
its bound, and no row falls behind decoding without drafts. Drafts that are refused pause; while
they pause, they are compared with what is sampled, which costs no pass, and they resume after
correct ones in a row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.policy.pass_layout import PassLayout, WidthCosts

MAX_DRAFTED = 16
"""Draft tokens per row and pass."""

FIRST_WIDTH = 2
"""Draft tokens of a pass after a pause; doubled by each draft that is accepted as a whole."""

N_CONFIRMATIONS = 2
MAX_CONFIRMATIONS = 128
"""Correct drafts in a row that end a pause."""

BACKOFF = 4
"""Factor of the confirmations after a pause whose first draft is refused."""

PAUSE_BELOW = 0.4
"""Rate of acceptance below which a row's drafts pause."""

RESUMED_RATE = 0.7
MAX_RATE = 0.92
FORCED_RATE = 0.99
"""The rate of acceptance after a pause, and the highest ones: every copied span ends, while the
end of a forced one is known."""

WEIGHT = 0.2
"""Weight of the newest token in the rate of acceptance."""

MIN_GAIN = 1.05
"""Tokens per second with drafts, relative to without: below this a gain is within the error."""

SCALE_WEIGHT = 0.2
WIDTH_WEIGHT = 0.05
"""Weights of the newest step in the seconds of all widths, and in those of its own width."""

MAX_LEAD = 32.0
"""Steps without drafts by which a row may be ahead, and so be delayed by the drafts of others."""


class DraftRecord(Struct, frozen=True):
    """Acceptance rate of one draft source in one request."""

    rate: float = RESUMED_RATE
    most_rate: float = MAX_RATE
    width: int = FIRST_WIDTH
    is_paused: bool = True
    n_confirmed: int = 0
    n_needed: int = N_CONFIRMATIONS


TRUSTED = DraftRecord(FORCED_RATE, FORCED_RATE, width=MAX_DRAFTED, is_paused=False)
"""For tokens that the grammar forces: only another tokenization can refuse them."""


class DraftOffer(Struct, frozen=True):
    """Draft that a row may bring."""

    n_tokens: int = 0
    rate: float = 0.0
    """Chance that a token is accepted after accepted ones."""
    n_known: int = 1
    """Tokens that the row brings anyway."""


class TokenChance(Struct, frozen=True):
    """Chance of a draft token."""

    row: int
    n: int
    """Its place in the draft, from 1 on."""
    chance: float
    """That it and all before it are accepted."""


class StepBounds(Struct, frozen=True):
    """Bounds of a step with drafts, and of its delay per row.

    A row may be delayed by what drafts have saved it so far, so that it is never behind decoding
    without drafts, and by what its own draft is expected to save. No entries: by anything.
    """

    most_s: float = inf
    leads: tuple[float, ...] = ()


UNBOUNDED = StepBounds()


def pass_widths(counts: Sequence[int], layout: PassLayout) -> list[int]:
    """Widths of the forward passes for these numbers of tokens."""
    longest = max(counts)
    if len(counts) == 1 or layout is PassLayout.ALONE:
        return list(counts)
    if layout is PassLayout.RAGGED or longest == 1:
        return [sum(counts)]
    if layout is PassLayout.PADDED:
        return [len(counts) * longest]
    n_single = counts.count(1)
    longer = [n for n in counts if n > 1]
    return [*longer, n_single] if n_single else longer


def observe_passes(costs: WidthCosts, passes: Sequence[int], seconds: float) -> WidthCosts:
    """Take the measured seconds of passes of these widths into account.

    Longer contexts and other load change all widths, so that all are scaled, and the known widths
    next to that of a single pass are corrected a little. More than twice the expected time counts
    as twice: something else was computed.
    """
    ratio = min(seconds / pass_seconds(passes, costs), 2.0)
    scale = 1 + SCALE_WEIGHT * (ratio - 1)
    scaled = [s * scale for s in costs.seconds]
    if len(passes) == 1:
        right = min(bisect_left(costs.widths, passes[0]), len(scaled) - 1)
        left = right if passes[0] >= costs.widths[right] else max(0, right - 1)
        for i in {left, right}:
            scaled[i] *= 1 + WIDTH_WEIGHT * (ratio - 1)
    return WidthCosts(costs.widths, tuple(scaled))


def verified(record: DraftRecord, n_drafted: int, n_accepted: int) -> DraftRecord:
    """Take a verified draft into account."""
    rate = record.rate
    for is_right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
        rate = _updated(rate, is_right, record.most_rate)
    if n_accepted == n_drafted:
        width = min(2 * record.width, MAX_DRAFTED)
        needed = max(record.n_needed // 2, N_CONFIRMATIONS)
        return replace(record, rate=rate, width=width, n_needed=needed)
    if rate >= PAUSE_BELOW and n_accepted:
        return replace(record, rate=rate, width=max(n_accepted, FIRST_WIDTH))
    backoff = BACKOFF if record.width == FIRST_WIDTH else 1
    needed = min(backoff * record.n_needed, MAX_CONFIRMATIONS)
    return DraftRecord(rate, record.most_rate, n_needed=needed)


def compared(record: DraftRecord, is_right: bool) -> DraftRecord:
    """Account for a draft token that was not fed."""
    if not record.is_paused:
        rate = _updated(record.rate, is_right, record.most_rate)
        return replace(record, rate=rate, is_paused=rate < PAUSE_BELOW)
    n_confirmed = record.n_confirmed + 1 if is_right else 0
    if n_confirmed < record.n_needed:
        return replace(record, n_confirmed=n_confirmed)
    return replace(record, rate=max(record.rate, RESUMED_RATE), is_paused=False, n_confirmed=0)


def lead_after(lead_s: float, n_accepted: int, taken_s: float, plain_s: float) -> float:
    """Seconds gained over decoding without drafts, after a step.

    Without drafts a step takes `plain_s`. Losses by its own refused drafts are not carried on.
    """
    lead_s += n_accepted * plain_s - (taken_s - plain_s)
    return min(max(lead_s, 0.0), MAX_LEAD * plain_s)


def allowed_seconds(
    offers: Sequence[DraftOffer], plain_s: float, bounds: StepBounds
) -> list[float]:
    """Maximum seconds of a step, of `plain_s` without drafts.

    Tokens that it brings beside its own, at a rate of acceptance, are a draft.
    """
    leads = bounds.leads or [inf] * len(offers)
    return [
        lead_s + plain_s * sum(offer.rate**n for n in range(offer.n_known))
        for offer, lead_s in zip(offers, leads, strict=True)
    ]


def widths(
    offers: Sequence[DraftOffer],
    costs: WidthCosts,
    layout: PassLayout = PassLayout.RAGGED,
    bounds: StepBounds = UNBOUNDED,
) -> list[int]:
    """Offered draft tokens that each row brings to the next pass.

    `offers` has one entry for each row, empty ones included. All widths are tried, since seconds
    may fall with the width: kernels work in bands of rows.
    """
    chances = [
        TokenChance(i, n, offer.rate**n)
        for i, offer in enumerate(offers)
        for n in range(1, offer.n_tokens + 1)
    ]
    if layout is PassLayout.RAGGED:
        chances.sort(key=lambda token: (-token.chance, token.n))
    elif layout is PassLayout.PADDED:
        chances.sort(key=lambda token: offers[token.row].n_known + token.n)
    else:
        chances.sort(key=lambda token: (-offers[token.row].rate, token.row))
    counts = [offer.n_known for offer in offers]
    tokens = float(len(offers))
    plain_s = step_seconds([1] * len(offers), costs, layout)
    allowed = allowed_seconds(offers, plain_s, bounds)
    best = MIN_GAIN * tokens / step_seconds(counts, costs, layout)
    n_best = 0
    for n, token in enumerate(chances, 1):
        counts[token.row] += 1
        tokens += token.chance
        allowed[token.row] += token.chance * plain_s
        seconds = step_seconds(counts, costs, layout)
        if tokens / seconds > best and seconds <= min(bounds.most_s, *allowed):
            best = tokens / seconds
            n_best = n
    brought = [0] * len(offers)
    for token in chances[:n_best]:
        brought[token.row] += 1
    return brought


def step_seconds(counts: Sequence[int], costs: WidthCosts, layout: PassLayout) -> float:
    """Seconds of the passes for rows that bring these numbers of tokens."""
    return pass_seconds(pass_widths(counts, layout), costs)


def pass_seconds(passes: Sequence[int], costs: WidthCosts) -> float:
    """Seconds of passes of these widths."""
    return sum(costs.seconds_at(width) for width in passes)


def _updated(rate: float, is_right: bool, most: float) -> float:
    return min(rate + WEIGHT * (is_right - rate), most)
