"""Three members in memory for two: a slice of `make soak`."""

from pathlib import Path

import pytest

from tests.endurance.front import LINGER_S, N_TURNS, front

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(600)]


def test_twelve_agents_over_two_models_and_kill_9(tmp_path: Path) -> None:
    found = front(tmp_path, seconds=15, n_agents=12, kill_every_s=6, seed=1)
    assert found.faults == [] and found.n_wrong == 0
    assert found.n_kills >= 2 and found.n_answers >= 12 * 2 * N_TURNS
    assert found.n_returns >= found.n_answers // 2 and found.n_cold == 0
    assert sum(found.n_unloads.values()) >= 1
    for n_unloads in found.n_unloads.values():
        assert n_unloads <= (found.seconds + 60) / LINGER_S + found.n_kills + 1
