"""Rules of equal bits: ranges of row counts, cost, decision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.exact_rows import ExactBits
from mlxstack.features.exact.policy import (
    HALF_TWELVES,
    MAX_PADDING,
    Costs,
    RowRange,
    common_ceiling,
    cost_of,
    decide,
    equal_range,
)

BITS = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(
    lambda labels: list(enumerate(labels, 1))
)


@given(BITS)
def test_all_counts_of_a_range_have_the_same_bits(bits: list[tuple[int, int]]) -> None:
    rows = equal_range(bits)
    if rows is None:
        return
    last = rows.ceiling or bits[-1][0]
    labels = {label for n, label in bits if rows.floor <= n <= last}
    assert len(labels) == 1
    assert last > rows.floor
    assert rows.floor <= MAX_PADDING


def test_bits_that_return_after_others_are_another_range() -> None:
    assert equal_range([(1, 0), (2, 0), (3, 1), (4, 0), (5, 0), (6, 0)]) == RowRange(4)


def test_a_lone_row_is_padded_to_the_first_of_equal_counts() -> None:
    """Quantized products of MLX on an M3: 2 to 12 rows have the same bits."""
    bits = [(1, 0), *((n, 1) for n in range(2, 13)), (13, 2), (16, 3)]
    assert equal_range(bits) == RowRange(2, 12)
    assert [RowRange(2, 12).padded(n) for n in (1, 2, 12, 13)] == [2, 2, 12, 13]
    assert [HALF_TWELVES.padded(n) for n in (1, 6, 7, 12, 13)] == [12, 12, 24, 24, 36]


def test_no_two_equal_counts_are_no_range() -> None:
    assert equal_range([(n, n) for n in range(1, 9)]) is None


def test_the_smallest_ceiling_bounds_all_layers() -> None:
    assert common_ceiling([RowRange(1), RowRange(2, 12), RowRange(1, 9)]) == 9
    assert common_ceiling([RowRange(1), RowRange(7)]) == 0


@pytest.mark.parametrize(
    ("setting", "why_not", "costs", "is_on", "reason"),
    [
        (ExactBits.OFF, "", Costs(0.0, 0.0), False, "is off"),
        (ExactBits.ON, "no width", Costs(0.0, 0.0), False, "no width"),
        (ExactBits.ON, "", Costs(), True, "is on"),
        (ExactBits.ON, "", Costs(0.9, 0.9), True, "is on"),
        (ExactBits.AUTO, "no width", Costs(0.0, 0.0), False, "no width"),
        (ExactBits.AUTO, "", Costs(0.05, 0.05), True, "5% of decode and 5% of prefill"),
        (ExactBits.AUTO, "", Costs(0.0, 0.06), False, "6% of prefill"),
        (ExactBits.AUTO, "", Costs(0.06), False, "6% of decode;"),
        (ExactBits.AUTO, "", Costs(0.01), False, "no time"),
    ],
)
def test_the_decision_and_its_reason(
    setting: ExactBits, why_not: str, costs: Costs, is_on: bool, reason: str
) -> None:
    is_decided, text = decide(setting, why_not, costs)
    assert is_decided is is_on
    assert reason in text


def test_a_faster_pass_costs_nothing() -> None:
    assert cost_of(2.0, 1.0) == 0.0
    assert cost_of(2.0, 3.0) == 0.5
