"""A slice of the lies of a member; `make soak` tells them all."""

from pathlib import Path

import pytest

from tests.endurance.lying_member import LIES, lying_member

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]
SLICE = frozenset(
    {"chat: less than announced", "chat: an upgrade", "health: an odd word", "models: other types"}
)


def test_a_member_that_lies_stops_no_gateway(tmp_path: Path) -> None:
    assert lying_member(tmp_path, SLICE).n_compared == len(SLICE)


@pytest.mark.soak
def test_all_lies_of_a_member_stop_no_gateway(tmp_path: Path) -> None:
    assert lying_member(tmp_path).n_compared == len(LIES)
