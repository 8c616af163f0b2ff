"""The Models screen beside a real gateway: members, their states, one loaded by a key."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from mlxstack.client.client import Client
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import LiveFeed
from mlxstack.tui.text_pages import page
from mlxstack.tui.theme import ThemeChoice
from mlxstack.tui.widgets.table import PatchedTable
from tests.gateway.real_members import Site, serving, write_presets
from tests.patience import until

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three members, none loaded."""
    folder = tmp_path_factory.mktemp("site")
    with serving(folder, write_presets(folder, {"port": 0})) as found:
        yield found


@asynccontextmanager
async def watching(site: Site) -> AsyncIterator[tuple[Pilot[Any], Dashboard]]:
    async with Client(site.url) as client:
        app = Dashboard(LiveFeed(client), client, ThemeChoice())
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("5")
            yield pilot, app


def rows(app: Dashboard) -> dict[str, list[str]]:
    """Cells of every row, by model."""
    table = app.screen.query(PatchedTable).first()
    cells = [[text.plain for text in table.get_row_at(i)] for i in range(table.row_count)]
    return {row[0].strip(): [one.strip() for one in row] for row in cells}


async def test_members_are_shown_before_any_of_them_runs_and_a_key_loads_one(site: Site) -> None:
    async with watching(site) as (pilot, app):
        await until(lambda: set(rows(app)) == {"demo", "tiny", "demo-embedding"})
        assert rows(app)["tiny"][1] == "unloaded"
        assert app.model.link.state.value == "lost", "no member gives frames yet"
        await pilot.press("down", "a")
        await until(lambda: rows(app)["tiny"][1] == "loaded")
        assert site.models()["tiny"]["status"] == {"value": "loaded"}
        assert rows(app)["demo"][1] == "unloaded"


async def test_requests_of_a_member_are_counted_and_the_text_page_lists_it(site: Site) -> None:
    async with watching(site) as (_, app):
        async with Client(site.url) as client:
            said = [{"role": "user", "content": "hi"}]
            body = {"messages": said, "model": "demo", "max_tokens": 4}
            await client.post("/v1/chat/completions", body)
        await until(lambda: rows(app).get("demo", [""] * 8)[5] == "1")
        await until(lambda: app.model.has_frame and rows(app)["demo"][4] == "0/4")
        assert "tiny" in page(app.model, 120)


async def test_one_service_is_one_row(tmp_path: Path) -> None:
    from tests.api.running import running, tiny_preset

    with running(tiny_preset(tmp_path / "tiny"), tmp_path / "home") as live:
        async with Client(live.url) as client:
            app = Dashboard(LiveFeed(client), client, ThemeChoice())
            async with app.run_test(size=(120, 40)) as pilot:
                await pilot.press("5")
                await until(lambda: len(rows(app)) == 1)
                (row,) = rows(app).values()
                assert row[1] == "ok" and row[4].startswith("0/")
