"""Processes of a Mac: births that a step of the clock leaves, names in one case."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxstack.core.errors import Taken
from mlxstack.host import process, services
from mlxstack.host.home import Home, make_home
from mlxstack.host.process import identify, is_alive
from mlxstack.host.services import (
    Phase,
    ServiceSpec,
    ServiceState,
    claim,
    write_json,
    write_private,
)


def test_a_process_lives_on_after_a_step_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil adds the step to `create_time()`, in a process that was there before it."""
    monkeypatch.setattr(process, "BOOT_ID", tmp_path / "no ids of boots, as on a Mac")
    before = identify(os.getpid())
    assert before is not None and is_alive(before)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 3600)
    assert is_alive(before)
    assert identify(os.getpid()) == before


@pytest.mark.parametrize(
    "private", [{}, {"_proc": SimpleNamespace(create_time=lambda: 4.0)}], ids=["renamed", "changed"]
)
def test_a_psutil_without_its_private_time_gives_the_public_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: dict[str, Any]
) -> None:
    monkeypatch.setattr(process, "BOOT_ID", tmp_path / "no ids of boots, as on a Mac")
    stub: Any = SimpleNamespace(create_time=lambda: 5.0, **private)
    assert process._birth(stub) == (5.0, "")


def state_of(home: Home, name: str) -> ServiceState:
    """State of a service whose supervisor is this process."""
    supervisor = identify(os.getpid())
    assert supervisor is not None
    plan = ServiceSpec(name, str(home.root), "demo", "http://127.0.0.1:1", ("true",))
    return ServiceState(plan, Phase.RUNNING, supervisor)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    make_home(home)
    return home


def test_a_name_that_differs_by_case_from_a_running_service_is_refused(home: Home) -> None:
    claim(state_of(home, "Coder"))
    with (
        pytest.raises(Taken, match=r"`Coder` is running, .* by case only.*down Coder"),
        services.starting(home, "coder", waits=True),
    ):
        pass
    with pytest.raises(Taken, match="by case only"):
        claim(state_of(home, "CODER"))


def test_the_name_of_a_service_that_ended_is_free_in_another_case(home: Home) -> None:
    write_json(home.state_file("Coder"), state_of(home, "Coder"))
    write_private(home.pid_file("Coder"), b"1\n")
    with services.starting(home, "coder", waits=True):
        claim(state_of(home, "coder"))
