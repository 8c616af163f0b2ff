"""Pictures of every screen, in three sizes and five states; docs/tui.md shows these very files."""

from pathlib import Path

from mlxstack.tui.recording import read_recording
from tests.tui import scenes, shots
from tests.tui.conftest import Shoot

RECORDED = Path(__file__).parent / "tapes" / "demo.jsonl"
NARROW = (80, 24)
WIDE = (120, 40)
HUGE = (200, 50)


def test_overview_empty_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), NARROW)


def test_overview_empty_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), WIDE)


def test_overview_busy_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW)


def test_overview_busy_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE)


def test_overview_overloaded_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), NARROW)


def test_overview_overloaded_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), WIDE)


def test_overview_disconnected_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), NARROW)


def test_overview_disconnected_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), WIDE)


def test_cache_empty_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), NARROW, "2")


def test_cache_empty_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), WIDE, "2")


def test_cache_busy_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "2")


def test_cache_busy_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "2")


def test_cache_overloaded_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), NARROW, "2")


def test_cache_overloaded_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), WIDE, "2")


def test_cache_disconnected_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), NARROW, "2")


def test_cache_disconnected_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), WIDE, "2")


def test_agents_empty_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), NARROW, "3")


def test_agents_empty_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), WIDE, "3")


def test_agents_busy_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3")


def test_agents_busy_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "3")


def test_agents_overloaded_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), NARROW, "3")


def test_agents_overloaded_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), WIDE, "3")


def test_agents_disconnected_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), NARROW, "3")


def test_agents_disconnected_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), WIDE, "3")


def test_requests_empty_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), NARROW, "4")


def test_requests_empty_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.empty(), WIDE, "4")


def test_requests_busy_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "4")


def test_requests_busy_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "4")


def test_requests_overloaded_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), NARROW, "4")


def test_requests_overloaded_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.overloaded(), WIDE, "4")


def test_requests_disconnected_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), NARROW, "4")


def test_requests_disconnected_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.disconnected(), WIDE, "4")


def test_one_agent_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "enter")


def test_one_agent_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "3", "enter")


def test_one_agent_that_missed_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "down", "enter")


def test_why_a_request_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "4", "down", "enter")


def test_why_a_request_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "4", "down", "enter")


def test_ask_priority_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "o")


def test_ask_priority_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "3", "o")


def test_ask_delete_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "3", "D")


def test_help_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), NARROW, "question_mark")


def test_help_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), WIDE, "question_mark")


def test_silent_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.silent(), NARROW, "2")


def test_recorded_overview_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED)[:-4], NARROW)


def test_recorded_cache_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED)[:-4], NARROW, "2")


def test_recorded_restart_80x24(shoot: Shoot) -> None:
    assert shoot(read_recording(RECORDED), NARROW)


def test_overview_loading_80x24(shoot: Shoot) -> None:
    assert shoot(scenes.loading(), NARROW)


def test_overview_loading_120x40(shoot: Shoot) -> None:
    assert shoot(scenes.loading(), WIDE)


def test_overview_busy_200x50(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), HUGE)


def test_cache_busy_200x50(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), HUGE, "2")


def test_agents_busy_200x50(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), HUGE, "3")


def test_requests_busy_200x50(shoot: Shoot) -> None:
    assert shoot(scenes.busy(), HUGE, "4")


def test_working_overview_80x24(shoot: Shoot) -> None:
    assert shoot(shots.working(), NARROW)


def test_working_overview_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE)


def test_working_overview_light_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, theme="mlx-stack-light")


def test_working_cache_light_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "2", theme="mlx-stack-light")


def test_working_cache_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "2")


def test_working_agents_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "3")


def test_working_agent_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "3", "enter")


def test_working_requests_120x40(shoot: Shoot) -> None:
    assert shoot(shots.working(), WIDE, "4")
