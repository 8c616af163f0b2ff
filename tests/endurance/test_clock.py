"""A slice of the jumps of the clock; `make soak` has more rounds."""

from pathlib import Path

import pytest

from mlxstack.core.commands import CollectGarbage
from mlxstack.core.preset import DiskSpec
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.kv_store import DiskKVStore
from tests.endurance.clock import DAY_S, clock
from tests.endurance.damaged import small
from tests.store.kv_files import small_blob

MONTH = CollectGarbage(max_age_s=30 * DAY_S)


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.net
@pytest.mark.parametrize("n_rounds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_a_clock_that_jumps_loses_no_agent_and_makes_no_negative_age(
    tmp_path: Path, n_rounds: int
) -> None:
    outcome = clock(tmp_path / "home", 1, n_rounds, small(tmp_path / "model"))
    assert outcome.n_jumps >= n_rounds - 1
    assert outcome.n_ages > 20


def test_a_jump_of_the_clock_makes_no_file_older(tmp_path: Path) -> None:
    store = DiskKVStore(tmp_path / "kv")
    clock = [0.0]
    steady = [0.0]
    store.write(small_blob())
    clock[0] = start = next(store.entries()).used_at
    quota = QuotaKVStore(
        store, AgentFolders(tmp_path / "agents"), DiskSpec(), lambda: clock[0], lambda: steady[0]
    )
    clock[0] = start + 365 * DAY_S
    steady[0] = DAY_S
    assert not quota.sweep(MONTH, frozenset()).victims
    steady[0] = 31 * DAY_S
    assert len(quota.sweep(MONTH, frozenset()).victims) == 1
