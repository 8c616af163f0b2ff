"""The first line: the screens, and what is watched."""

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from mlxstack.core.formatting import printable

MODES = ("overview", "cache", "agents", "requests", "models")


class Tab(Static):
    """Shows its screen when it is clicked; the number is its key."""

    def __init__(self, mode: str, current: str) -> None:
        super().__init__(
            f" {MODES.index(mode) + 1} {mode.capitalize()} ", markup=False, classes="tab"
        )
        self.set_class(mode == current, "-current")
        self._mode = mode

    async def on_click(self) -> None:
        await self.run_action(f"app.show('{self._mode}')")


class Nav(Horizontal):
    """Tabs: screens with their keys, and the name of the feed."""

    def __init__(self, current: str, feed: str) -> None:
        super().__init__()
        self._current = current
        self._feed = feed

    def compose(self) -> ComposeResult:
        for mode in MODES:
            yield Tab(mode, self._current)
        yield Static(printable(self._feed, 60), markup=False, classes="feed")
