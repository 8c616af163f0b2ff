"""Row padding: never fewer rows, never more time, and only where it saves enough."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.row_padding import MIN_GAIN, padded_counts

SECONDS = st.lists(st.floats(1e-6, 1.0), max_size=65)


@given(SECONDS)
def test_padding_saves_time_or_is_none(seconds: list[float]) -> None:
    counts = padded_counts(seconds)
    assert len(counts) == len(seconds)
    for n, count in enumerate(counts):
        assert count >= n
        assert count == n or seconds[count] <= (1 - MIN_GAIN) * seconds[n]


@given(SECONDS)
def test_no_larger_count_takes_less_time(seconds: list[float]) -> None:
    for n, count in enumerate(padded_counts(seconds)):
        best = min(seconds[n:])
        assert seconds[count] == best or (count == n and best > (1 - MIN_GAIN) * seconds[n])


def test_of_equally_fast_counts_the_smallest_is_taken() -> None:
    assert padded_counts([1.0, 3.0, 2.0, 2.0]) == (0, 2, 2, 3)


def test_a_processor_without_such_counts_pads_nothing() -> None:
    assert padded_counts([0.0, 1.0, 1.1, 1.2, 1.3]) == (0, 1, 2, 3, 4)
