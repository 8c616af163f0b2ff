"""Agent tests again, with the step-ahead path of GPUs forced on; tests/engine runs so anyhow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.engine.decode import batch
from tests import models
from tests.api import test_agents
from tests.api.conftest import complete_headers, http, live, model_folder
from tests.api.test_agents import (
    bob,
    test_b10_the_server_keeps_the_history,
    test_e12_turns_of_one_agent_follow_one_another,
    test_e13_agents_run_side_by_side,
    test_fork_goes_on_from_the_same_state,
    test_rewind_goes_back_to_a_message,
)
from tests.mac.step_ahead_run import run_ahead

__all__ = [
    "bob",
    "complete_headers",
    "http",
    "live",
    "model_folder",
    "test_b10_the_server_keeps_the_history",
    "test_e12_turns_of_one_agent_follow_one_another",
    "test_e13_agents_run_side_by_side",
    "test_fork_goes_on_from_the_same_state",
    "test_rewind_goes_back_to_a_message",
]
"""Fixtures and tests of the API that pytest finds here too."""

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def step_ahead() -> Iterator[None]:
    """Submit every step before the last one is read, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "has_gpu", lambda: True)
        yield


def test_layers_that_cannot_be_cut_branch_and_come_back(tmp_path: Path) -> None:
    test_agents.test_g3_g5_layers_that_cannot_be_cut_branch_and_come_back(tmp_path, models.HYBRID)


@pytest.mark.soak
def test_the_agent_tests_pass_a_step_ahead() -> None:
    assert run_ahead("float32", ("tests/api/test_agents.py",)) > 20
