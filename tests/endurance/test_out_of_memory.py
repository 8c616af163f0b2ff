"""A slice of the shortages of memory; `make soak` has more of each."""

from pathlib import Path

import pytest

from tests.endurance.out_of_memory import PHASES, Shortage, out_of_memory

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.slow,
    pytest.mark.net,
    pytest.mark.skipif("not hasattr(__import__('psutil'), 'RLIMIT_AS')", reason="Linux has limits"),
]


def test_a_worker_without_memory_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    outcome = out_of_memory(tmp_path, Shortage((0,), n_kills=1), seed=1)
    assert outcome.n_ended + outcome.n_survived == 1
    assert outcome.n_kills == len(PHASES)


@pytest.mark.soak
def test_many_workers_without_memory_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    outcome = out_of_memory(tmp_path, Shortage(), seed=2)
    assert outcome.n_ended
    assert outcome.n_cut
