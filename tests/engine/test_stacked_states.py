"""Recurrent state of rows that stay the same is read without a copy."""

import gc

import mlx.core as mx
import pytest

from mlxstack.engine.model.row_views import StackedStates

pytestmark = pytest.mark.mlx


@pytest.fixture
def states() -> StackedStates:
    return StackedStates()


def stacked(n_rows: int = 3) -> mx.array:
    value = mx.arange(n_rows * 4).reshape(n_rows, 4)
    mx.eval(value)
    return value


def test_the_same_rows_read_the_array_that_they_wrote(states: StackedStates) -> None:
    value = stacked()
    assert states.join(states.split(value)) is value


@pytest.mark.parametrize("order", [(0, 1), (1, 2), (1, 0, 2), (0, 1, 2, 0)])
def test_other_rows_are_copied_in_their_order(
    states: StackedStates, order: tuple[int, ...]
) -> None:
    value = stacked()
    rows = states.split(value)
    joined = states.join([rows[i] for i in order])
    assert joined is not value
    assert mx.array_equal(joined, value[mx.array(order)])


@pytest.mark.parametrize("replaced", range(3))
def test_a_row_with_another_state_is_read_anew(states: StackedStates, replaced: int) -> None:
    known = states.split(stacked())
    rows = [*known]
    rows[replaced] = mx.full((1, 4), -1)
    assert states.join(rows)[replaced].tolist() == [-1] * 4


def test_an_equal_array_that_is_not_the_slice_is_copied(states: StackedStates) -> None:
    value = stacked()
    rows = [mx.array(row) for row in states.split(value)]
    assert states.join(rows) is not value


def test_rows_of_two_passes_do_not_mix(states: StackedStates) -> None:
    first = states.split(stacked())
    second = states.split(stacked() + 100)
    assert states.join([first[0], *second[1:]]).tolist()[0] == [0, 1, 2, 3]
    assert states.join([second[0], *first[1:]]).tolist()[1] == [4, 5, 6, 7]


def test_a_stack_is_freed_with_the_slice_of_its_first_row(states: StackedStates) -> None:
    rows = states.split(stacked())
    rows[0] = mx.zeros((1, 4))
    gc.collect()
    assert not states._by_first


def test_the_arrays_of_many_passes_do_not_pile_up(states: StackedStates) -> None:
    value = stacked()
    rows = states.split(value)
    for _ in range(50):
        rows = states.split(states.join(rows) + 1)
        mx.eval(rows)
    assert len(states._by_first) == 1
    assert mx.array_equal(states.join(rows), value + 50)
