"""What a long text costs: work that grows with its length alone, and never for all threads."""

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.text.cuts import turn_ends


def spent_s(text: str, first: str) -> float:
    """The least CPU seconds of this thread in three tries."""
    spent = []
    for _ in range(3):
        begun = time.thread_time()
        assert len(turn_ends(text, [(first, True), ("x", True)], len(text))) == 2
        spent.append(time.thread_time() - begun)
    return min(spent)


def test_a_turn_that_nearly_repeats_itself_is_found_as_fast_as_any() -> None:
    k = 10_000
    mean = "a" * k + "b" + "a" * k
    plain = "".join(map(str, range(k)))[: len(mean)]
    worst = spent_s(f"<u>{mean}<a>{'a' * 10 * k}<u>x<a>", mean)
    usual = spent_s(f"<u>{plain}<a>{'c' * 10 * k}<u>x<a>", plain)
    # CPU time against CPU time: the product of the lengths would be hundreds of times as much.
    assert worst < 50 * usual


@given(st.text("ab", max_size=40), st.lists(st.text("ab ", max_size=4), max_size=4), st.data())
def test_turns_are_found_where_they_stand_last(text: str, said: list[str], data: Any) -> None:
    end = data.draw(st.integers(0, len(text)))
    expected, before = [], end
    for one in reversed([one.strip() for one in said]):
        if one and (start := text.rfind(one, 0, before)) >= 0:
            expected.append(start + len(one))
            before = start
    assert turn_ends(text, [(one, False) for one in said], end) == expected
