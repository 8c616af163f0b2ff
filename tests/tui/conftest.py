"""Makes pictures the same on every machine, and takes them."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.command import CommandList
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot

from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import News
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.theme import HOUSE, ThemeChoice
from tests.patience import PATIENCE_S
from tests.tui.slot_service import Clerk

PICTURES_BY = (3, 11)

Shoot = Callable[..., bool]


class ParsedRules(dict[tuple[Any, ...], list[RuleSet]]):
    """Rules by their source, which stylesheets with equal variables share."""

    def clear(self) -> None:
        """Stay: a stylesheet with other variables takes another one."""


_parsed: dict[frozenset[tuple[str, str]], ParsedRules] = {}


def parsed_rules(stylesheet: Stylesheet) -> ParsedRules:
    """Rules that any stylesheet with these variables has parsed."""
    return _parsed.setdefault(frozenset(stylesheet._variables.items()), ParsedRules())


# Each of hundreds of dashboards would parse the same styles.
Stylesheet._parse_cache = property(parsed_rules, lambda *_: None)  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse updates that break pictures: of another Python's layout, or without `--soak`."""
    if not config.getoption("--soak"):
        # Pictures of tests that are left to `--soak` are unused, which would fail the run.
        config.option.warn_unused_snapshots = True
    if not config.getoption("--snapshot-update", False):
        return
    if sys.version_info[:2] != PICTURES_BY:
        raise pytest.UsageError(f"pictures are drawn by Python {PICTURES_BY} only")
    if not config.getoption("--soak"):
        raise pytest.UsageError("add --soak: the pictures of tests that do not run are deleted")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two variables that change pictures; what it says stays, however slow we look."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TEXTUAL_THEME", raising=False)
    monkeypatch.setattr(Dashboard, "NOTIFICATION_TIMEOUT", 3600)


async def settled(pilot: Pilot[Any]) -> None:
    """The tape is over and everything is drawn."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    await pilot.pause()


async def offered(pilot: Pilot[Any], text: str) -> None:
    """The palette lists this first."""
    found = pilot.app.screen.query_one(CommandList)
    async with asyncio.timeout(PATIENCE_S):
        while not (found.option_count and text in str(found.get_option_at_index(0).prompt)):
            await pilot.pause(0.02)
    await pilot.pause()


def on_tape(tape: tuple[News, ...]) -> Dashboard:
    """A dashboard that has only a tape to look at."""
    return Dashboard(RecordingFeed("127.0.0.1:7109", tape), None, ThemeChoice())


@pytest.fixture
def shoot(snap_compare: Any) -> Shoot:
    """Compare a screen after a tape with its picture."""

    def compare(
        tape: tuple[News, ...], size: tuple[int, int], *keys: str, theme: str = HOUSE.name
    ) -> bool:
        async def before(pilot: Pilot[Any]) -> None:
            await settled(pilot)
            await pilot.press(*keys)
            await pilot.pause()

        look = ThemeChoice(theme)
        app = Dashboard(RecordingFeed("127.0.0.1:7109", tape), Clerk(), look)
        run: Callable[[Pilot[Any]], Awaitable[None]] = before
        return bool(snap_compare(app, terminal_size=size, run_before=run))

    return compare
