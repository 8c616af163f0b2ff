"""A slice of the residency thrash; `make soak` has more clients."""

from pathlib import Path

import pytest

from tests.endurance.thrash import CONFIGS, thrash

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@pytest.mark.parametrize(
    ("n_clients", "n_requests"), [(4, 3), pytest.param(300, 6, marks=pytest.mark.soak)]
)
def test_models_by_turns_in_room_for_one_answer_right_or_503(
    tmp_path: Path, n_clients: int, n_requests: int
) -> None:
    outcome = thrash(tmp_path, n_clients, n_requests)
    assert outcome.n_answers == n_clients * n_requests
    assert outcome.n_loads > len(CONFIGS)
    assert 0 < outcome.n_reserved <= outcome.budget
    assert n_clients < 300 or outcome.n_refused
