"""Draft lengths of a draft model, by row.

Its tokens cost passes of the draft model before any is verified, and a context of its own that
must be computed first. So rows are drafted for while tokens per second grow, passes of both
models counted, and drafts may lose no more than a small share of the time: `credit` is what they
may still lose. Where no draft is worth its cost, a short one is tried as soon as the credit pays
for it, which shows whether that has changed.
"""

from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.features.drafts.policy.ngram_draft_governor import (
    FIRST_WIDTH,
    MIN_GAIN,
    RESUMED_RATE,
    UNBOUNDED,
    DraftOffer,
    StepBounds,
    allowed_seconds,
    step_seconds,
)
from mlxstack.policy.pass_layout import PassLayout, WidthCosts

SIZES = tuple(2**n for n in range(9))
"""Numbers of rows that are weighed: the likeliest ones, and at last all of them."""

MAX_AHEAD = 8
"""Tokens that a draft model drafts for a row at most."""

LOSS_SHARE = 0.005
"""Share of the seconds of decoding that drafts may lose in the long run."""

MAX_CREDIT = 4.0
"""Steps without drafts that may be lost after drafts have saved as many."""

START_CREDIT = 1.0
"""Steps without drafts that may be lost at the start."""

START_S = 1.0
"""Further seconds that a draft model may lose at the start, which a long context needs.

What drafts from hidden states has no context to compute first.
"""

ROW_WEIGHT = 0.15
MODEL_WEIGHT = 0.03
"""Weights of the newest verified token in the acceptance rates of its row and of all rows."""

N_PROVEN = 48
"""Verified tokens after which the rate of all rows decides whether a prefill is worth it."""

TYPICAL_ANSWER = 256
"""Tokens of an answer that are expected at most: requests rarely use their limit."""


class DraftModelRecord(Struct, frozen=True):
    """Acceptance of the drafts of a model."""

    costs: WidthCosts
    """Seconds of its passes."""
    rate: float = RESUMED_RATE
    """Rate of acceptance in all rows."""
    n_verified: int = 0
    credit: float | None = None
    """Seconds that drafts may still lose; None before the first step was measured."""
    start_s: float = START_S
    """Seconds of the credit at the start, beside a few steps."""
    most: int = MAX_AHEAD
    """Tokens that are drafted for a row at most."""
    is_block: bool = False
    """Whether one pass brings a whole draft, in place of a pass for each of its tokens."""

    def drafting_s(self, n_rows: int, n_tokens: int) -> float:
        """Seconds to draft `n_tokens` for each of `n_rows`.

        A pass of a block holds the last known token of each row too.
        """
        if self.is_block:
            return self.costs.seconds_at(n_rows * (1 + n_tokens))
        return n_tokens * self.costs.seconds_at(n_rows)

    @property
    def may_lose(self) -> bool:
        """Whether a draft of uncertain worth may be tried."""
        return self.credit is None or self.credit > 0


class DraftPlan(Struct, frozen=True):
    """Step without the drafts of a model, and its bounds."""

    counts: Sequence[int]
    """Tokens of each row."""
    costs: WidthCosts
    """Seconds of the target's passes."""
    layout: PassLayout = PassLayout.RAGGED
    bounds: StepBounds = UNBOUNDED

    def seconds(self, counts: Sequence[int]) -> float:
        """Seconds of the target's passes for rows with these numbers of tokens."""
        return step_seconds(counts, self.costs, self.layout)


def plan_drafts(
    record: DraftModelRecord, rates: Mapping[int, float], plan: DraftPlan
) -> dict[int, int]:
    """Tokens to draft for each row; none for rows left out.

    `rates` are those of the rows that can be drafted for. The passes of both models are within the
    bounds.
    """
    if not rates or not record.may_lose:
        return {}
    likeliest = sorted(rates, key=lambda row: -rates[row])
    best = MIN_GAIN * len(plan.counts) / plan.seconds(plan.counts)
    widths: dict[int, int] = {}
    for rows in (likeliest[:n] for n in SIZES if n < 2 * len(likeliest)):
        chosen = {row: rates[row] for row in rows}
        speeds = _speeds(record, chosen, plan)
        fastest = max(speeds)
        if fastest > best:
            best = fastest
            widths = dict.fromkeys(rows, 1 + speeds.index(fastest))
    if widths:
        return widths
    # A draft that is not expected to pay shows whether the rate is still what it was.
    first = likeliest[0]
    n_first = min(FIRST_WIDTH, record.most)
    brought = [n + n_first * (row == first) for row, n in enumerate(plan.counts)]
    trial_s = plan.seconds(brought) + record.drafting_s(1, n_first)
    plain_s = plan.seconds(plan.counts)
    if trial_s <= min(plan.bounds.most_s, plain_s + _credit(record, plain_s)):
        return {first: n_first}
    return {}


def verified(rate: float, n_drafted: int, n_accepted: int, weight: float = ROW_WEIGHT) -> float:
    """Rate of acceptance after a verified draft."""
    for is_right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
        rate += weight * (is_right - rate)
    return rate


def settled(
    record: DraftModelRecord,
    n_drafted: int,
    n_accepted: int,
    spent_s: float,
    plain_s: float,
    n_rows: int = 1,
) -> DraftModelRecord:
    """Take the verified drafts of one step of `n_rows` into account.

    The step took `spent_s` seconds longer for them, passes of the draft model included; without
    drafts it takes `plain_s`.
    """
    before = _credit(record, plain_s)
    credit = before + n_accepted * plain_s / n_rows - spent_s
    return replace(
        record,
        rate=verified(record.rate, n_drafted, n_accepted, MODEL_WEIGHT),
        n_verified=record.n_verified + n_accepted + (n_accepted < n_drafted),
        credit=min(credit, max(before, MAX_CREDIT * plain_s)),
    )


def stepped(record: DraftModelRecord, seconds: float, plain_s: float) -> DraftModelRecord:
    """Take a decode step into account; without drafts it takes `plain_s` seconds."""
    credit = _credit(record, plain_s)
    return replace(
        record, credit=max(credit, min(credit + LOSS_SHARE * seconds, MAX_CREDIT * plain_s))
    )


def charged(record: DraftModelRecord, seconds: float) -> DraftModelRecord:
    """Account for a prefill of unknown worth."""
    return replace(record, credit=_credit(record) - seconds)


def prefill_seconds(
    record: DraftModelRecord, n_behind: int, n_left: float, costs: WidthCosts
) -> float:
    """Maximum seconds for the next of `n_behind` tokens; 0 for none.

    At most `n_left` tokens are still to be sampled. Unless drafts have proven to save more than
    all of it takes, it is paid by the credit.
    """
    plain_s = costs.seconds_at(1)
    gain = plain_s * max(_speeds(record, {0: record.rate}, DraftPlan([1], costs)))
    saved_s = plain_s * (1 - 1 / gain) * min(n_left, TYPICAL_ANSWER)
    is_proven = record.n_verified >= N_PROVEN and gain > MIN_GAIN
    if is_proven and saved_s > record.costs.seconds_at(n_behind):
        return inf
    return max(0.0, _credit(record))


def tokens_within(costs: WidthCosts, seconds: float, most: int) -> int:
    """Tokens of a prefill chunk of at most `seconds`; minimum 16."""
    n_tokens = 16
    while 2 * n_tokens <= most and costs.seconds_at(2 * n_tokens) <= seconds:
        n_tokens *= 2
    return n_tokens


def _credit(record: DraftModelRecord, plain_s: float = 0.0) -> float:
    if record.credit is None:
        return record.start_s + START_CREDIT * plain_s
    return record.credit


def _speeds(record: DraftModelRecord, rates: Mapping[int, float], plan: DraftPlan) -> list[float]:
    """Expected tokens per second with drafts of 1, 2, ... tokens.

    0 where the step would not stay within the bounds.
    """
    brought = list(plan.counts)
    tokens = float(len(plan.counts))
    speeds = []
    plain_s = plan.seconds([1] * len(plan.counts))
    offers = [DraftOffer(n_known=n) for n in plan.counts]
    allowed = allowed_seconds(offers, plain_s, plan.bounds)
    # Until its rate is known a draft may cost no more than may be lost.
    at_risk_s = inf
    if record.n_verified < N_PROVEN:
        at_risk_s = plan.seconds(plan.counts) + _credit(record, plain_s)
    for n_tokens in range(1, record.most + 1):
        for row, rate in rates.items():
            brought[row] += 1
            tokens += rate**n_tokens
            allowed[row] += rate**n_tokens * plain_s
        seconds = plan.seconds(brought) + record.drafting_s(len(rates), n_tokens)
        is_allowed = seconds <= min(plan.bounds.most_s, at_risk_s, *allowed)
        speeds.append(tokens / seconds if is_allowed else 0.0)
    return speeds
