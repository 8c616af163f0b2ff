"""Child processes of a worker are spawned: a fork would copy the memory map of the weights."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from mlxstack.engine.template_check import check_template
from mlxstack.host import hardware, spare_power
from mlxstack.host.sleep import SleepAssertion
from mlxstack.planner import model_shapes
from mlxstack.planner.model_shapes import shapes_of
from mlxstack.text.limited_process import LimitedProcess
from tests import forked
from tests.conftest import ModelOf
from tests.models import LLAMA

pytestmark = [pytest.mark.mlx, pytest.mark.net]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Programs that are started by posix_spawn."""
    programs: list[str] = []
    real: Callable[..., int] = os.posix_spawn

    def spawn(path: Any, *positional: Any, **more: Any) -> int:
        programs.append(os.fsdecode(path))
        return real(path, *positional, **more)

    monkeypatch.setattr(os, "posix_spawn", spawn)
    monkeypatch.setattr(subprocess.Popen, "_execute_child", forked.EXECUTE)
    yield programs


def test_the_program_that_tells_the_thermal_level(
    spawned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_power, "THERMAL", ("/bin/echo",))
    assert spare_power.thermal_level() is None
    assert spawned == ["/bin/echo"]


def test_the_program_that_builds_a_model_without_weights(
    spawned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_shapes, "_shapes", {})
    assert shapes_of([LLAMA])[0].shape is not None
    assert len(spawned) == 1


def test_the_program_that_tells_the_limit_of_the_gpus_memory(spawned: list[str]) -> None:
    with suppress(FileNotFoundError):
        hardware._wired_limit()
    assert spawned == ["/usr/sbin/sysctl"]


def test_the_program_that_keeps_the_computer_awake(spawned: list[str]) -> None:
    assertion = SleepAssertion(("/bin/sleep", "1000"))
    assertion._acquire()
    assertion.close()
    assert spawned == ["/bin/sleep"]


def test_the_program_that_checks_a_template(spawned: list[str], model_of: ModelOf) -> None:
    check_template(model_of("tiny"))
    assert spawned == [sys.executable]


def test_the_program_that_renders_templates(spawned: list[str]) -> None:
    process = LimitedProcess("mlxstack.text.rendering.worker", 2**30)
    process._running()
    process.close()
    assert spawned == [sys.executable]
