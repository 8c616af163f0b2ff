"""Agent tests again, with the step-ahead path of GPUs forced on; tests/engine runs so anyhow."""

import pytest

from tests.mac.step_ahead_run import run_ahead

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_agent_tests_pass_a_step_ahead() -> None:
    assert run_ahead("float32", ("tests/api/test_agents.py",)) > 20
