"""Pictures of dialogs, and those that docs/tui.md shows."""

from pathlib import Path

import pytest

from mlxstack.tui.recording import read_recording
from tests.tui import scenes, shots
from tests.tui.conftest import Shoot

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "tapes" / "demo.jsonl"
NARROW = (80, 24)
WIDE = (120, 40)


def test_overview_overloaded_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), NARROW)


def test_overview_disconnected_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), NARROW)


@pytest.mark.soak
def test_one_agent_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "enter")


@pytest.mark.soak
def test_one_agent_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "3", "enter")


@pytest.mark.soak
def test_one_agent_that_missed_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "down", "enter")


def test_why_a_request_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "4", "down", "enter")


@pytest.mark.soak
def test_why_a_request_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "4", "down", "enter")


def test_ask_priority_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "o")


@pytest.mark.soak
def test_ask_priority_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "3", "o")


@pytest.mark.soak
def test_ask_delete_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "D")


def test_help_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "question_mark")


@pytest.mark.soak
def test_help_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "question_mark")


def test_silent_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.silent(), NARROW, "2")


def test_models_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.gateway(), WIDE, "5")


@pytest.mark.soak
def test_recorded_overview_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED)[:-4], NARROW)


@pytest.mark.soak
def test_recorded_cache_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED)[:-4], NARROW, "2")


def test_recorded_restart_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED), NARROW)


def test_working_overview_80x24(shoot: Shoot) -> None:
    assert shoot(shots.working(), NARROW)


@pytest.mark.soak
def test_working_overview_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE)


@pytest.mark.soak
def test_working_overview_light_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, theme="mlx-stack-light")


@pytest.mark.soak
def test_working_cache_light_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "2", theme="mlx-stack-light")


def test_working_cache_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "2")


@pytest.mark.soak
def test_working_agents_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "3")


def test_working_agent_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "3", "enter")


@pytest.mark.soak
def test_working_requests_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "4")
