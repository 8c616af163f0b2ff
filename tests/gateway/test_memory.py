"""Three members in memory for two: a slice of `make soak`."""

from pathlib import Path

import pytest

from tests.endurance.front import check, front

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


def test_twelve_agents_over_two_models_and_kill_9(tmp_path: Path) -> None:
    check(front(tmp_path, seconds=10, n_agents=12, kill_every_s=3, seed=1))
