"""A slice of two services of one home; `make soak` has more rounds."""

from pathlib import Path

import pytest

from tests.endurance.two_homes import two_homes

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]


@pytest.mark.parametrize("n_rounds", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_two_services_of_one_home_lose_no_turn_and_change_no_answer(
    tmp_path: Path, n_rounds: int
) -> None:
    outcome = two_homes(tmp_path, seed=1, n_rounds=n_rounds)
    assert outcome.n_rounds == n_rounds
    assert outcome.n_turns > 2 * n_rounds
    assert outcome.n_compared > 4 * n_rounds
