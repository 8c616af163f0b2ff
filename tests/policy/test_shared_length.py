"""How much two token sequences share."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.kv.prefix_index import STRIDE, common_prefix

tokens = st.lists(st.integers(0, 3), max_size=40)


def plain(one: list[int], other: list[int]) -> int:
    """The definition, written as it reads."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


@given(tokens, tokens, tokens)
def test_d2_it_is_the_definition(head: list[int], one: list[int], other: list[int]) -> None:
    one = head + one
    other = head + other
    assert common_prefix(one, tuple(other)) == plain(one, other)


@given(st.integers(0, 2 * STRIDE + 2), st.integers(0, 2 * STRIDE + 2))
def test_d2_around_the_strides(at: int, n: int) -> None:
    one = [1] * n
    other = [1] * n
    if at < n:
        other[at] = 2
    assert common_prefix(one, other) == min(at, n)
