"""Finished requests, and where their time went."""

from collections.abc import Iterable

from textual.widget import Widget

from mlxstack.core.status import RequestView
from mlxstack.tui.screens.base import BaseScreen
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.views import requests
from mlxstack.tui.widgets.titled_table import TitledTable


def why_page(request: RequestView) -> TextPage:
    """Page with the times of a request; v shows its headers."""
    return TextPage("Why", requests.why(request), more=requests.response_headers(request))


class RequestsScreen(BaseScreen):
    """The last requests; press Enter for the timing of a request."""

    MODE = "requests"
    HELP = "requests"

    def compose_body(self) -> Iterable[Widget]:
        yield TitledTable(requests.requests, "requests")

    async def open(self, section: str, key: str) -> None:
        """Why, for one request."""
        del section
        request = requests.request(self.model, key)
        if request is not None:
            await self.app.push_screen(why_page(request))
