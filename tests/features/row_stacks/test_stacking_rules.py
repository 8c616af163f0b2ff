"""Row stacking: bounds of padding and bytes, steps before the copy and layers of each."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.features.row_stacks.policy import StackingRules

RULES = StackingRules()
LENGTHS = st.lists(st.integers(1, 5000), min_size=2, max_size=8)


@given(LENGTHS)
def test_padding_is_bounded(lengths: list[int]) -> None:
    padding = len(lengths) * max(lengths) - sum(lengths)
    assert RULES.is_worth(lengths, 0) == (padding / len(lengths) <= RULES.most_padding)


@given(st.integers(1, 5000), st.integers(2, 8))
def test_even_rows_are_bounded_by_their_bytes(length: int, n_rows: int) -> None:
    assert RULES.is_worth([length] * n_rows, RULES.most_bytes)
    assert not RULES.is_worth([length] * n_rows, RULES.most_bytes + 1)


def test_neither_one_row_nor_none_is_stacked() -> None:
    assert not RULES.is_worth([100], 0)
    assert not RULES.is_worth([], 0)


@given(st.integers(1, 100), st.integers(0, 1 << 32))
def test_a_step_copies_no_more_than_its_bound_or_one_layer(n_layers: int, n_bytes: int) -> None:
    n_due = RULES.layers_due(n_layers, n_bytes)
    assert n_due >= 1
    assert n_due == 1 or n_due * n_bytes <= n_layers * RULES.building_bytes


@given(st.integers(0, 1 << 32), st.integers(2, 8), st.integers(1, 100))
def test_rows_wait_as_many_steps_as_repay_the_copy(
    n_bytes: int, n_rows: int, n_layers: int
) -> None:
    n_steps = RULES.steps_before(n_bytes, n_rows, n_layers) - RULES.least_steps
    repaid = RULES.repaid_bytes * n_rows * n_layers
    assert n_steps * repaid <= n_bytes < (n_steps + 1) * repaid
