"""Every screen in three sizes, two themes and five states: its text, and its styles in runs."""

from collections.abc import Callable
from itertools import groupby, product
from typing import Any

import pytest
from rich.style import Style
from textual.app import App

from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import News
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.theme import HOUSE, LIGHT, ThemeChoice
from mlxstack.tui.widgets.tabs import MODES
from tests.tui import scenes
from tests.tui.conftest import settled
from tests.tui.slot_service import Clerk

pytestmark = pytest.mark.slow

SIZES = ((80, 24), (120, 40), (200, 50))
THEMES = (HOUSE.name, LIGHT.name)
EACH = list(zip((HOUSE.name, LIGHT.name, HOUSE.name), (SIZES[1], SIZES[0], SIZES[2]), strict=True))
"""Each theme and each size once."""
STATES = (
    scenes.empty,
    scenes.busy,
    scenes.overloaded,
    scenes.disconnected,
    scenes.loading,
    scenes.gateway,
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_screens(
    state: Callable[[], tuple[News, ...]], snapshot: Any, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--soak"):
        looks = list(product(THEMES, SIZES))
    else:
        looks = EACH if state is scenes.busy else EACH[:1]
    app = Dashboard(RecordingFeed("127.0.0.1:7109", state()), Clerk(), ThemeChoice())
    async with app.run_test(size=SIZES[0]) as pilot:
        await settled(pilot)
        for theme, (width, height) in looks:
            app.theme = theme
            await pilot.resize_terminal(width, height)
            for key, mode in enumerate(MODES, 1):
                await pilot.press(str(key))
                await settled(pilot)
                assert picture(app) == snapshot(name=f"{mode} {width}x{height} {theme}")


def picture(app: App[Any]) -> str:
    """Lines of text, the styles of each line in runs, and the legend of the styles."""
    texts = []
    runs = []
    letters = dict[str, str]()
    # The last line, the footer, is composed later than the rest.
    for strip in app.screen._compositor.render_strips()[:-1]:
        cells = [(_told(part.style), len(part.text)) for part in strip]
        line = []
        for told, group in groupby(cells, key=lambda cell: cell[0]):
            letter = letters.setdefault(told, chr(ord("a") + len(letters)))
            line.append(f"{letter}{sum(n for _, n in group)}")
        texts.append(f"{strip.text.rstrip()}")
        runs.append(" ".join(line))
    legend = [f"{letter}: {told}" for told, letter in letters.items()]
    return "\n".join((*texts, "", *runs, "", *legend))


def _told(style: Style | None) -> str:
    """Colors and attributes; links and ids of handlers are left out."""
    if style is None:
        return "plain"
    return str(
        Style(
            color=style.color,
            bgcolor=style.bgcolor,
            bold=style.bold,
            dim=style.dim,
            italic=style.italic,
            underline=style.underline,
            reverse=style.reverse,
        )
    )
