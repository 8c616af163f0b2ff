"""Makes pictures the same on every machine, and takes them."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import News
from mlxstack.tui.tape import TapeFeed
from mlxstack.tui.theme import Look
from tests.tui.clerk import Clerk

PICTURES_BY = (3, 11)

Shoot = Callable[..., bool]


def pytest_configure(config: pytest.Config) -> None:
    """Other versions of Python lay some characters out differently."""
    if config.getoption("--snapshot-update", False) and sys.version_info[:2] != PICTURES_BY:
        raise pytest.UsageError(f"pictures are drawn by Python {PICTURES_BY} only")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two variables that change pictures."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TEXTUAL_THEME", raising=False)


async def settled(pilot: Pilot[Any]) -> None:
    """The tape is over and everything is drawn."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    await pilot.pause()


def on_tape(tape: tuple[News, ...]) -> Dashboard:
    """A dashboard that has only a tape to look at."""
    return Dashboard(TapeFeed("127.0.0.1:7109", tape), None, Look())


@pytest.fixture
def shoot(snap_compare: Any) -> Shoot:
    """Compare a screen after a tape with its picture."""

    def compare(tape: tuple[News, ...], size: tuple[int, int], *keys: str) -> bool:
        async def before(pilot: Pilot[Any]) -> None:
            await settled(pilot)
            await pilot.press(*keys)
            await pilot.pause()

        app = Dashboard(TapeFeed("127.0.0.1:7109", tape), Clerk(), Look())
        run: Callable[[Pilot[Any]], Awaitable[None]] = before
        return bool(snap_compare(app, terminal_size=size, run_before=run))

    return compare
