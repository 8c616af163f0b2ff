"""The draft governor on the published costs of wide passes: no loss, and a gain on copies."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.features.drafts.policy.ngram_draft_governor import (
    MAX_DRAFTED,
    MAX_RATE,
    N_CONFIRMATIONS,
    TRUSTED,
    DraftOffer,
    DraftRecord,
    StepBounds,
    compared,
    lead_after,
    observe_passes,
    pass_seconds,
    pass_widths,
    step_seconds,
    verified,
    widths,
)
from mlxstack.policy.pass_layout import PassLayout, WidthCosts
from tests.repetition import in_soak

Curve = Callable[[int], float]


def banded(curve: Curve) -> Curve:
    """A tiled kernel takes over above 16 rows; it costs as its whole band of 32."""
    return lambda width: curve(width) if width <= 16 else curve(16) * (1 + 0.3 * -(-width // 32))


def points(*known: tuple[int, float]) -> Curve:
    costs = WidthCosts(tuple(w for w, _ in known), tuple(s for _, s in known))
    return costs.seconds_at


CURVES: dict[str, Curve] = {
    # mlxcel, mtp-b1-gate-m3ultra: a whole round of 31B, and of 12B on the M1.
    "M3 Ultra": banded(lambda k: 0.83 + 0.17 * k),
    "M1 Ultra": banded(lambda k: (1.35 + 0.346 * k) if k > 1 else 1.0),
    # https://github.com/ml-explore/mlx/issues/3839 and pull 3791.
    "M4 Pro": banded(points((1, 1.0), (2, 1.12), (3, 1.35), (4, 1.35), (8, 2.2), (16, 4.4))),
    "M5 Max": banded(points((1, 1.0), (3, 1.12), (5, 1.45), (8, 2.2), (12, 3.2), (16, 4.2))),
    # https://github.com/ml-explore/mlx/issues/4265: before the wide kernels.
    "older path": banded(points((1, 1.0), (2, 1.8), (4, 3.3), (8, 6.1), (16, 12.0))),
}
AT_LOAD = (1, 2, 4, 8, 16, 32, 64)
N_TOKENS = 600

Text = Callable[[Random, int, bool], bool]
"""Whether the drafted token at a position is right, for a draft that is fed or only compared."""


def copying(random: Random, at: int, is_fed: bool) -> bool:
    """An edited file: spans of about 40 tokens are copied, between them 4 are new."""
    return at % 44 < 40


def prose(random: Random, at: int, is_fed: bool) -> bool:
    """A common phrase now and then."""
    return random.random() < 0.15


def code(random: Random, at: int, is_fed: bool) -> bool:
    """About as often right as wrong."""
    return random.random() < 0.55


def always_wrong(random: Random, at: int, is_fed: bool) -> bool:
    return False


def treacherous(random: Random, at: int, is_fed: bool) -> bool:
    """Right as long as it is not fed."""
    return not is_fed


class Simulation:
    """Rows that decode N_TOKENS each on one curve, with a governor that sees noisy times."""

    def __init__(
        self, curve: Curve, texts: list[Text], seed: int, layout: PassLayout = PassLayout.RAGGED
    ) -> None:
        self.curve, self.texts, self.random = curve, texts, Random(seed)
        self.layout = layout
        self.seconds = 0.0
        self.n_tokens = 0
        self.at = [0] * len(texts)

    def run(self, is_drafting: bool, record: DraftRecord = DraftRecord()) -> float:  # noqa: B008
        """Tokens per second until the first row has ended."""
        leads = [0.0] * len(self.texts)
        costs = WidthCosts(AT_LOAD, tuple(self.timed(width) for width in AT_LOAD))
        records = [record] * len(self.texts)
        at = self.at
        while max(at) < N_TOKENS:
            offers = [DraftOffer(0 if r.is_paused else r.width, r.rate) for r in records]
            bounds = StepBounds(leads=tuple(leads))
            brought = widths(offers, costs, self.layout, bounds) if is_drafting else [0] * len(at)
            passes = pass_widths([1 + n for n in brought], self.layout)
            taken = sum(map(self.timed, passes))
            expected = pass_seconds(passes, costs)
            plain = step_seconds([1] * len(at), costs, self.layout)
            costs = observe_passes(costs, passes, taken)
            self.seconds += taken
            for row, n in enumerate(brought):
                records[row], n_accepted = self.verify(row, at[row], n, records[row])
                at[row] += 1 + n_accepted
                leads[row] = lead_after(leads[row], n_accepted, expected, plain)
                self.n_tokens += 1 + n_accepted
        return self.n_tokens / self.seconds

    def verify(
        self, row: int, at: int, n_drafted: int, record: DraftRecord
    ) -> tuple[DraftRecord, int]:
        text = self.texts[row]
        if n_drafted:
            rights = [text(self.random, at + i, True) for i in range(n_drafted)]
            n_accepted = (*rights, False).index(False)
            return verified(record, n_drafted, n_accepted), n_accepted
        return compared(record, text(self.random, at, False)), 0

    def timed(self, width: int) -> float:
        return self.curve(width) * self.random.uniform(0.97, 1.03)


def gain(curve: str, texts: list[Text], seed: int, layout: PassLayout = PassLayout.RAGGED) -> float:
    """Tokens per second with drafts, relative to without."""
    on = Simulation(CURVES[curve], texts, seed, layout).run(True)
    return on / Simulation(CURVES[curve], texts, seed, layout).run(False)


@pytest.mark.parametrize("n_rows", [1, 8, *in_soak(4)])
@pytest.mark.parametrize("text", [copying, prose, code, always_wrong, treacherous])
@pytest.mark.parametrize("curve", CURVES)
def test_drafts_never_cost_more_than_two_percent(curve: str, text: Text, n_rows: int) -> None:
    gains = sorted(gain(curve, [text] * n_rows, seed) for seed in range(3))
    assert gains[1] >= 0.98


@pytest.mark.parametrize("layout", [PassLayout.PADDED, PassLayout.APART, PassLayout.ALONE])
@pytest.mark.parametrize("curve", CURVES)
def test_no_layout_of_passes_costs_more_than_two_percent(curve: str, layout: PassLayout) -> None:
    """One row that copies makes a padded pass wide for all, and a pass apart costs a whole one."""
    assert gain(curve, [copying, *[prose] * 7], 1, layout) >= 0.98
    assert gain(curve, [treacherous] * 4, 1, layout) >= 0.98


@pytest.mark.parametrize("layout", [PassLayout.PADDED, PassLayout.ALONE])
def test_copies_gain_in_other_layouts(layout: PassLayout) -> None:
    assert gain("M5 Max", [copying] * 4, 1, layout) >= 1.3


@pytest.mark.parametrize("curve", ["M3 Ultra", "M4 Pro", "M5 Max"])
def test_copies_gain_where_wide_passes_are_cheap(curve: str) -> None:
    assert gain(curve, [copying], 1) >= 1.8
    assert gain(curve, [copying] * 4, 1) >= 1.3


@pytest.mark.parametrize("curve", CURVES)
def test_rows_that_do_not_copy_lose_nothing_to_one_that_does(curve: str) -> None:
    texts: list[Text] = [copying, prose, code, always_wrong]
    sides = [Simulation(CURVES[curve], texts, 1) for _ in range(2)]
    for side, is_drafting in zip(sides, (True, False), strict=True):
        side.run(is_drafting)
    for n_on, n_off in zip(*(side.at for side in sides), strict=True):
        assert n_on / sides[0].seconds >= 0.98 * n_off / sides[1].seconds


def test_a_draft_that_is_wrong_whenever_it_is_fed_is_fed_ever_more_rarely() -> None:
    record = DraftRecord()
    fed = []
    for at in range(2000):
        if record.is_paused:
            record = compared(record, True)
        else:
            record = verified(record, record.width, 0)
            fed.append(at)
    assert len(fed) < 40
    gaps = [b - a for a, b in pairwise(fed)]
    assert gaps[0] < gaps[1] < gaps[2]


def test_confirmations_end_a_pause_and_a_wrong_one_begins_them_anew() -> None:
    record = DraftRecord()
    for is_right in [True] * (N_CONFIRMATIONS - 1) + [False]:
        record = compared(record, is_right)
    assert record.is_paused
    assert record.n_confirmed == 0
    for _ in range(N_CONFIRMATIONS):
        record = compared(record, True)
    assert not record.is_paused


def test_accepted_drafts_widen_and_refused_ones_narrow_and_pause() -> None:
    record = DraftRecord(is_paused=False)
    seen = [record := verified(record, record.width, record.width) for _ in range(6)]
    assert [r.width for r in seen] == [4, 8, 16, 16, 16, 16]
    assert verified(seen[-1], 16, 5).width == 5
    assert verified(seen[-1], 16, 0).is_paused


def test_the_likelier_row_gets_the_wider_draft() -> None:
    flat = WidthCosts((1, 32), (1.0, 4.0))
    brought = widths([DraftOffer(8, 0.5), DraftOffer(8, 0.95), DraftOffer()], flat)
    assert brought[1] > brought[0] >= 0
    assert brought[2] == 0


def test_a_cheap_band_is_reached_over_a_dear_one() -> None:
    costs = WidthCosts((1, 2, 8, 16), (1.0, 3.0, 3.0, 3.0))
    assert widths([DraftOffer(2, 0.9)], costs) == [0]
    assert widths([DraftOffer(MAX_DRAFTED, 0.99)], costs)[0] >= 8


@given(st.lists(st.tuples(st.integers(0, MAX_DRAFTED), st.floats(0, 1)), min_size=1, max_size=8))
def test_no_row_brings_more_than_it_offers(offers: list[tuple[int, float]]) -> None:
    brought = widths([DraftOffer(*one) for one in offers], WidthCosts())
    assert all(0 <= n <= most for n, (most, _) in zip(brought, offers, strict=True))


@given(st.integers(1, 64), st.floats(0.4, 2.5))
def test_measured_seconds_are_learned(width: int, factor: float) -> None:
    costs = WidthCosts(AT_LOAD, tuple(1 + 0.1 * w for w in AT_LOAD))
    true = factor * costs.seconds_at(width)
    for _ in range(200):
        costs = observe_passes(costs, [width], true)
    assert costs.seconds_at(width) == pytest.approx(true, rel=0.05)
    for other in AT_LOAD:
        assert costs.seconds_at(other) == pytest.approx(factor * (1 + 0.1 * other), rel=0.3)


def test_forced_tokens_are_trusted_until_they_are_refused() -> None:
    assert not TRUSTED.is_paused
    assert TRUSTED.width == MAX_DRAFTED
    assert verified(TRUSTED, 5, 0).is_paused
    costs = WidthCosts((1, 8, 16), (1.0, 2.2, 4.2))
    forced = TRUSTED
    copied = verified(DraftRecord(rate=MAX_RATE, is_paused=False), 2, 2)
    for _ in range(9):
        forced = verified(forced, 8, 8)
        copied = verified(copied, 8, 8)
    brought = [widths([DraftOffer(8, one.rate)] * 4, costs) for one in (forced, copied)]
    assert sum(brought[0]) > sum(brought[1])


def test_padding_is_filled_and_a_pass_apart_is_used_in_full() -> None:
    costs = WidthCosts(AT_LOAD, (1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.2))
    offers = [DraftOffer(4, 0.9), DraftOffer(4, 0.5), DraftOffer(0, 0.0), DraftOffer(2, 0.9)]
    brought = widths(offers, costs, PassLayout.PADDED)
    assert brought == [min(one.n_tokens, max(brought)) for one in offers]
    replaying = [DraftOffer(n_known=5), DraftOffer(4, 0.1)]
    assert widths(replaying, costs, PassLayout.PADDED) == [0, 4]
    assert widths(replaying, costs, PassLayout.RAGGED) == [0, 0]
    one = widths([DraftOffer(8, 0.95), DraftOffer(), DraftOffer()], costs, PassLayout.APART)
    assert one == [8, 0, 0]
    assert pass_widths([1, 3, 1, 2], PassLayout.APART) == [3, 2, 2]
    assert pass_widths([1, 3, 1, 2], PassLayout.PADDED) == [12]
    assert pass_widths([1, 3, 1, 2], PassLayout.RAGGED) == [7]
    assert pass_widths([1, 3, 1, 2], PassLayout.ALONE) == [1, 3, 1, 2]
