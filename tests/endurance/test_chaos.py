"""A slice of the chaos; `make chaos` runs it for half an hour."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.endurance.chaos import Chaos
from tests.endurance.tally import Counted, Tally

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.mark.net
def test_chaos_ends_with_every_history_answer_and_counter_as_it_should(tmp_path: Path) -> None:
    outcome = Chaos(tmp_path, seed=328).run(lambda n_rounds: n_rounds >= 12)
    assert outcome.n_requests > 50
    assert outcome.n_kills == 1
    assert outcome.n_unsure > 0
    assert outcome.n_swaps > 0
    assert outcome.n_meddled > 0
    assert outcome.n_proven >= 24 + 18


def test_the_books_of_a_chaos_notice_what_is_missing() -> None:
    counted = Counted(
        is_idle=True, n_requests=2, n_completed=2, n_cancelled=0, n_failed=0,
        n_prompt=30, n_cached=10, n_generated=9,
    )  # fmt: skip
    books = Tally()
    books.add(20, 4)
    books.add(20, 5)
    books.check(counted)
    for wrong in (
        replace(counted, n_requests=3),
        replace(counted, n_generated=8),
        replace(counted, n_cached=9),
        replace(counted, is_idle=False),
    ):
        with pytest.raises(AssertionError):
            books.check(wrong)
