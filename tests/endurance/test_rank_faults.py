"""All faults of two ranks; a slice is among the tests of `up --hosts`."""

from pathlib import Path

import pytest

from tests.endurance.ranks import ranks_under_faults

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.soak]


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_stop_or_die_change_no_answer(tmp_path: Path, seed: int) -> None:
    assert ranks_under_faults(tmp_path, seed).n_compared == 4
