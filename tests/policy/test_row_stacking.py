"""Row stacking: bounds of padding and bytes, and layers over steps."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.row_stacking import StackingRules

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


@given(st.integers(1, 100), st.integers(1, 20))
def test_all_layers_are_stacked_in_time_and_about_equally_many_per_step(
    n_layers: int, n_steps: int
) -> None:
    rules = StackingRules(building_steps=n_steps)
    due = [0, *(rules.layers_due(n_layers, i) for i in range(n_steps))]
    each = [b - a for a, b in pairwise(due)]
    assert due[-1] == n_layers
    assert all(0 <= n <= -(-n_layers // n_steps) for n in each)
