"""Speculative decoding: how many draft tokens each row brings to the next forward pass.

A draft token costs what the pass gets wider, and is worth the chance that it is accepted. Rows
are widened in the order of that chance, as far as tokens per second grow. Drafts that are refused
pause; while they pause, they are compared with what is sampled, which costs no pass, and they
resume after correct ones in a row.
"""

from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

MOST_DRAFTED = 16
"""Draft tokens per row and pass."""

FIRST_WIDTH = 2
"""Draft tokens of a pass after a pause; doubled by each draft that is accepted as a whole."""

N_CONFIRMATIONS, MOST_CONFIRMATIONS = 2, 128
"""Correct drafts in a row that end a pause."""

BACKOFF = 4
"""Factor of the confirmations after a pause whose first draft is refused."""

PAUSE_BELOW = 0.4
"""Rate of acceptance below which a row's drafts pause."""

RESUMED_RATE, MOST_RATE = 0.7, 0.92
"""The rate of acceptance after a pause, and the highest one: every copied span ends."""

WEIGHT = 0.2
"""Of the newest token in the rate of acceptance."""

LEAST_GAIN = 1.05
"""Tokens per second with drafts, relative to without: below this a gain is within the error."""

SCALE_WEIGHT, WIDTH_WEIGHT = 0.2, 0.03
"""Of the newest step in the seconds of all widths, and in those of its own width."""


class DraftRecord(Struct, frozen=True):
    """How the drafts of one source have fared in one request."""

    rate: float = RESUMED_RATE
    width: int = FIRST_WIDTH
    is_paused: bool = True
    n_confirmed: int = 0
    n_needed: int = N_CONFIRMATIONS


TRUSTED = DraftRecord(rate=MOST_RATE, width=MOST_DRAFTED, is_paused=False)
"""For tokens that the grammar forces: only another tokenization can refuse them."""


class DraftOffer(Struct, frozen=True):
    """A row that could bring `n_tokens` draft tokens, each accepted at `rate` after the others."""

    n_tokens: int = 0
    rate: float = 0.0


class WidthCosts(Struct, frozen=True):
    """Seconds of a forward pass by its width in tokens, ascending widths."""

    widths: tuple[int, ...] = (1,)
    seconds: tuple[float, ...] = (1.0,)

    def seconds_at(self, width: int) -> float:
        """Interpolate between known widths; beyond them the last slope goes on."""
        widths, seconds = self.widths, self.seconds
        if len(widths) == 1 or width <= widths[0]:
            return seconds[0]
        i = min(bisect_right(widths, width), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return max(seconds[i - 1] + slope * (width - widths[i - 1]), seconds[0])


UNMEASURED = WidthCosts()
"""All widths cost the same."""


def observe_width(costs: WidthCosts, width: int, seconds: float) -> WidthCosts:
    """Take a measured pass into account.

    Longer contexts and other load change all widths, so that all are scaled, and the measured one
    is corrected a little. A pass of more than twice the expected time counts as twice: something
    else was computed.
    """
    expected = costs.seconds_at(width)
    ratio = min(seconds / expected, 2.0)
    scale = 1 + SCALE_WEIGHT * (ratio - 1)
    own = 1 + WIDTH_WEIGHT * (ratio - 1)
    return WidthCosts(
        costs.widths,
        tuple(
            s * scale * (own if w == width else 1.0)
            for w, s in zip(costs.widths, costs.seconds, strict=True)
        ),
    )


def verified(record: DraftRecord, n_drafted: int, n_accepted: int) -> DraftRecord:
    """Take a verified draft into account."""
    rate = record.rate
    for is_right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
        rate = _updated(rate, is_right)
    if n_accepted == n_drafted:
        width = min(2 * record.width, MOST_DRAFTED)
        needed = max(record.n_needed // 2, N_CONFIRMATIONS)
        return replace(record, rate=rate, width=width, n_needed=needed)
    if rate >= PAUSE_BELOW and n_accepted:
        return replace(record, rate=rate, width=max(n_accepted, FIRST_WIDTH))
    backoff = BACKOFF if record.width == FIRST_WIDTH else 1
    needed = min(backoff * record.n_needed, MOST_CONFIRMATIONS)
    return DraftRecord(rate=rate, n_needed=needed)


def compared(record: DraftRecord, is_right: bool) -> DraftRecord:
    """Take a draft token into account that was not fed: paused, or not worth its width."""
    if not record.is_paused:
        rate = _updated(record.rate, is_right)
        return replace(record, rate=rate, is_paused=rate < PAUSE_BELOW)
    n_confirmed = record.n_confirmed + 1 if is_right else 0
    if n_confirmed < record.n_needed:
        return replace(record, n_confirmed=n_confirmed)
    return replace(record, rate=max(record.rate, RESUMED_RATE), is_paused=False, n_confirmed=0)


def widths(offers: Sequence[DraftOffer], costs: WidthCosts) -> list[int]:
    """How many of the offered draft tokens each row brings to the next pass.

    `offers` has one entry for each row, empty ones included. All widths are tried, since seconds
    may fall with the width: kernels work in bands of rows.
    """
    chances = sorted(
        (
            (offer.rate**n, i)
            for i, offer in enumerate(offers)
            for n in range(1, offer.n_tokens + 1)
        ),
        key=lambda one: -one[0],
    )
    n_rows = len(offers)
    tokens = float(n_rows)
    best, n_best = LEAST_GAIN * tokens / costs.seconds_at(n_rows), 0
    for n, (chance, _) in enumerate(chances, 1):
        tokens += chance
        gained = tokens / costs.seconds_at(n_rows + n)
        if gained > best:
            best, n_best = gained, n
    brought = [0] * n_rows
    for _, i in chances[:n_best]:
        brought[i] += 1
    return brought


def _updated(rate: float, is_right: bool) -> float:
    return min(rate + WEIGHT * (is_right - rate), MOST_RATE)
