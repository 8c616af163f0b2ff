"""Child processes of a worker are spawned: a fork would copy the memory map of the weights."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxstack.host import spare_power
from mlxstack.planner.model_shapes import shapes_of
from tests.models import LLAMA

pytestmark = pytest.mark.net


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Programs that are started by posix_spawn."""
    programs: list[str] = []
    real: Callable[..., int] = os.posix_spawn

    def spawn(path: Any, *rest: Any, **more: Any) -> int:
        programs.append(os.fsdecode(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "posix_spawn", spawn)
    yield programs


def test_the_program_that_tells_the_thermal_level(
    spawned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_power, "THERMAL", ("/bin/echo",))
    assert spare_power.thermal_level() is None
    assert spawned == ["/bin/echo"]


def test_the_program_that_builds_a_model_without_weights(spawned: list[str]) -> None:
    assert shapes_of([LLAMA])[0].shape is not None
    assert len(spawned) == 1
