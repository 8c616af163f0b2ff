"""Short slices of the long runs; `make soak` runs them in full."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxstack.demo import MODEL_DIR
from tests.conftest import ModelOf
from tests.endurance.crowd import crowd
from tests.endurance.cuts import cuts
from tests.endurance.disk_faults import call_faults, disk_faults, spoiled_files
from tests.endurance.fidelity import fidelity
from tests.endurance.kills import kills
from tests.endurance.loris import Slowness, loris
from tests.endurance.revivals import revivals
from tests.endurance.roundabout import roundabout
from tests.endurance.soak import soak
from tests.repetition import in_soak

APART = ("unshare", "-rm")


def unthreaded() -> dict[str, str]:
    """The environment without a preloaded BLAS, whose threads forbid `unshare` a new namespace."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def can_mount() -> bool:
    """Whether this system lets anybody have mounts of their own."""
    if shutil.which("unshare") is None:
        return False
    trial = [*APART, "sh", "-c", "mount -t tmpfs none /mnt"]
    done = subprocess.run(trial, env=unthreaded(), capture_output=True, check=False)
    return done.returncode == 0


pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["tiny-hybrid", *in_soak("tiny", "tiny-swa")])
def test_a_crowd_gets_what_everybody_gets_alone(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    outcome = crowd(model_of(kind), tmp_path, seconds=0, seed=1, n_tails=4)
    assert outcome.n_compared > 10
    assert outcome.n_saved > 0
    assert outcome.bytes_after <= outcome.bytes_before + 4096


@pytest.mark.parametrize("kind", ["tiny-swa", *in_soak("tiny", "tiny-hybrid")])
def test_d4_f8_thirty_agents_over_four_slots_and_a_budget_for_six(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    outcome = soak(model_of(kind), tmp_path, n_requests=90, seed=1)
    assert outcome.worst < 0.1
    assert outcome.n_checked == 18
    assert outcome.hit_share > 0.2


def test_c11_killed_while_saving_and_serving(model_of: ModelOf, tmp_path: Path) -> None:
    outcome = kills(model_of("tiny"), tmp_path, n_kills=4, seed=1)
    assert outcome.n_files > 0


def test_c11_power_lost_while_serving_and_saving(model_of: ModelOf, tmp_path: Path) -> None:
    outcome = cuts(model_of("tiny-hybrid"), tmp_path, n_turns=6, n_engines=2, seed=1)
    assert outcome.n_contexts > 100
    assert outcome.n_answered > 5
    assert outcome.n_deleted > 0, "room was never made"


@pytest.mark.net
@pytest.mark.skipif(not can_mount(), reason="a disk of one's own needs `unshare -rm`")
def test_g12_a_real_disk_fills_up_and_turns_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "tests.endurance.small_disk", str(tmp_path / "tiny")]
    done = subprocess.run(
        [*APART, *command, str(disk)],
        env=unthreaded(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "kept its word\n", done.stderr


@pytest.mark.net
@pytest.mark.parametrize(
    ("n_requests", "swap_every", "n_returns"), [(27, 12, 5), *in_soak((54, 20, 20))]
)
def test_g3_g5_twelve_agents_two_models_a_restart_and_a_kill(
    tmp_path: Path, n_requests: int, swap_every: int, n_returns: int
) -> None:
    outcome = roundabout(tmp_path, n_requests, swap_every, seed=1)
    assert (outcome.n_swaps, outcome.n_starts) == (2, 3)
    assert outcome.n_returns > n_returns


@pytest.mark.net
def test_a9_a_worker_killed_under_load_is_back_by_itself_and_agents_kept_their_kv(
    tmp_path: Path,
) -> None:
    outcome = revivals(MODEL_DIR, tmp_path, n_blows=2, seed=1)
    assert outcome.n_returns == 10
    assert outcome.least_share > 0
    assert outcome.talk.n_cut > 0


@pytest.mark.net
@pytest.mark.parametrize("kind", ["demo", *in_soak("sliding", "hybrid")])
def test_answers_of_a_busy_service_are_those_from_cold(tmp_path: Path, kind: str) -> None:
    outcome = fidelity(tmp_path, kind, seconds=0, seed=1, n_least=7)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert outcome.counts["compared from cold"] > 2


def test_a_disk_that_fails_at_any_operation_loses_nothing_acknowledged(
    model_of: ModelOf, tmp_path: Path
) -> None:
    outcome = disk_faults(model_of("tiny-hybrid"), tmp_path, n_faults=3, n_turns=3, seed=1)
    assert outcome.n_met == 3
    assert outcome.n_ops > 20


def test_a_file_that_cannot_be_opened_moved_or_made_loses_nothing_acknowledged(
    model_of: ModelOf, tmp_path: Path
) -> None:
    outcome = call_faults(model_of("tiny-hybrid"), tmp_path, n_faults=3, n_turns=3, seed=1)
    assert outcome.n_met == 3
    assert outcome.n_ops > 40


@pytest.mark.net
def test_slow_clients_of_a_gateway_hold_nobody_up(tmp_path: Path) -> None:
    outcome = loris(tmp_path, Slowness(40, 40, 4, 4, 10, 40))
    assert (outcome.n_compared, outcome.n_read) == (40, 4)


def test_files_spoiled_while_an_engine_serves_change_no_answer(
    model_of: ModelOf, tmp_path: Path
) -> None:
    outcome = spoiled_files(model_of("tiny-hybrid"), tmp_path, n_turns=6, seed=1)
    assert outcome.n_spoiled > 0
