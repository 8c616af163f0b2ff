"""Agent tests again, with the step-ahead path of GPUs forced on; tests/engine runs so anyhow."""

import pytest

from tests.mac.step_ahead_run import run_ahead

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

FILE = "tests/api/test_agents.py"
PATHS = (
    f"{FILE}::test_b10_the_server_keeps_the_history",
    f"{FILE}::test_fork_goes_on_from_the_same_state",
    f"{FILE}::test_rewind_goes_back_to_a_message",
    f"{FILE}::test_e12_turns_of_one_agent_follow_one_another",
    f"{FILE}::test_e13_agents_run_side_by_side",
    f"{FILE}::test_g3_g5_layers_that_cannot_be_cut_branch_and_come_back[tiny-hybrid]",
)


def test_agents_go_on_branch_and_come_back_a_step_ahead() -> None:
    assert run_ahead("float32", PATHS) == len(PATHS)


@pytest.mark.soak
def test_the_agent_tests_pass_a_step_ahead() -> None:
    assert run_ahead("float32", (FILE,)) > 20
