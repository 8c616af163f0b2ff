"""Tests of batches, joins, ends, forks, slot files and agents again, a step ahead in bfloat16."""

import pytest

from tests.mac.step_ahead_run import run_ahead

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

ENGINE = "tests/engine/test_"
FEW_PATHS = (
    f"{ENGINE}batch_equals_alone.py::test_e1_joining_one_by_one_equals_alone",
    f"{ENGINE}batch_equals_alone.py::test_e2_one_forward_for_all_rows",
    f"{ENGINE}batch_equals_alone.py::test_z4_seeds_penalties_and_bias_stay_in_the_batch",
    f"{ENGINE}batch_equals_alone.py::test_z3_rows_of_different_kv_precision_in_one_batch",
)
PATHS = (
    f"{ENGINE}batch_equals_alone.py",
    f"{ENGINE}conversations_and_slots.py",
    f"{ENGINE}memory.py::test_g10_parked_and_resumed_goes_on_as_if_alone",
    f"{ENGINE}memory.py::test_d3_two_agents_hold_a_shared_head_once",
)
MORE_PATHS = (
    f"{ENGINE}ends.py",
    f"{ENGINE}guided_rows.py",
    f"{ENGINE}keeping.py",
    f"{ENGINE}serving.py",
    f"{ENGINE}slot_files.py",
)


def test_batches_pass_a_step_ahead_in_half_precision() -> None:
    assert run_ahead("bfloat16", FEW_PATHS) >= len(FEW_PATHS)


@pytest.mark.soak
def test_more_engine_tests_pass_a_step_ahead_in_half_precision() -> None:
    assert run_ahead("bfloat16", (*PATHS, *MORE_PATHS), "--soak") > 60
