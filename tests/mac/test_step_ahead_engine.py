"""The engine, agent and slot tests again, with the step-ahead path of GPUs forced on."""

import pytest

from tests.mac.step_ahead_run import run_ahead

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

PATHS = ("tests/engine",)
AGENTS = ("tests/api/test_agents.py",)


def test_the_engine_tests_pass_a_step_ahead() -> None:
    assert run_ahead("float32", PATHS) > 200


def test_the_agent_tests_pass_a_step_ahead() -> None:
    assert run_ahead("float32", AGENTS) > 20
