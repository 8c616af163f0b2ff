"""Finished requests, and where their time went."""

from collections.abc import Iterable
from typing import ClassVar

from textual.widget import Widget

from mlxstack.core.status import RequestView
from mlxstack.tui.screens.base import BaseScreen
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.views import requests
from mlxstack.tui.widgets.titled_table import TitledTable


def why_page(one: RequestView) -> TextPage:
    """Page with the times of a request; v shows its headers."""
    return TextPage("Why", requests.why(one), more=requests.response_headers(one))


class RequestsScreen(BaseScreen):
    """The last ones; enter tells why one took what it took."""

    MODE = "requests"
    EXPLAINS: ClassVar[str] = (
        "The last finished requests, the latest on top. `ttft` is the time from its arrival to its "
        "first token. `phases` is all of its time as a bar, all bars on one scale: queued, waited "
        "for other prompts and answers, read KV, computed the prompt, wrote the answer. Wide "
        "terminals have `queue`, `prefill` and `decode` as numbers too.\n\n"
        "Enter shows the phases, whose sum is the time until the first token, and why it reused no "
        "more; v there shows the values of its response headers."
    )

    def compose_body(self) -> Iterable[Widget]:
        """One table."""
        yield TitledTable(requests.requests, "requests")

    async def open(self, section: str, key: str) -> None:
        """Why, for one request."""
        del section
        one = requests.request(self.model, key)
        if one is not None:
            await self.app.push_screen(why_page(one))
