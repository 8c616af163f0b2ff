"""What is said of samples is true of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.bench.report import at_least, at_most, targets_table
from mlxstack.bench.statistics import lasting, megabytes, percentile, ratio, seconds, spread

FLOATS = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(FLOATS, min_size=1))
def test_a_median_lies_within_its_spread(values: list[float]) -> None:
    of = spread(values)
    assert of.low <= of.median <= of.high
    assert of.n == len(values)


@given(st.lists(FLOATS, min_size=1))
def test_percentiles_rise_and_end_at_the_greatest(values: list[float]) -> None:
    steps = [percentile(values, p) for p in (1, 25, 50, 75, 99, 100)]
    assert all(a <= b + 1e-9 * max(values) for a, b in pairwise(steps))
    assert steps[-1] == max(values)


def test_percentiles_of_a_known_row() -> None:
    values = list(range(101))
    assert [percentile(values, p) for p in (1, 50, 99)] == [1, 50, 99]
    assert percentile([], 99) == 0.0


def test_a_ratio_to_nothing_is_nothing() -> None:
    assert ratio(3, 0) == 0.0
    assert ratio(3, 2) == 1.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0000214, "21.4 us"), (0.0123, "12.3 ms"), (2.5, "2.50 s"), (130.2, "130 s")],
)
def test_durations_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


def test_several_values_are_shown_with_their_spread() -> None:
    assert lasting([0.002]) == "2 ms"
    assert lasting([0.003, 0.001, 0.002]) == "2 ms (1 ms to 3 ms)"
    assert megabytes(65_000_000) == "65 MB"


def test_targets_are_met_on_the_right_side() -> None:
    assert at_most("a", 1.0, 1.0).is_met
    assert not at_most("a", 1.01, 1.0).is_met
    assert at_least("b", 2.0, 2.0).is_met
    assert not at_least("b", 1.99, 2.0).is_met
    rows = targets_table([at_most("a", 2.0, 1.0), at_least("b", 3, 2, "tokens")]).rows
    assert rows[0] == ("a", "at most 1.00 x", "2.00 x", "MISSED")
    assert rows[1] == ("b", "at least 2 tokens", "3 tokens", "met")
