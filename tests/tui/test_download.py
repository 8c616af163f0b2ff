"""A model that a service downloads is on the dashboard, with its bytes."""

import asyncio
import os
import re
import subprocess
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from mlxstack.client.client import Client
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec
from mlxstack.core.status import StatusFrame
from mlxstack.tui.feed import LiveFeed
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.overview import health
from tests import hub
from tests.cli.terminal import CLI
from tests.ports import unused_port

pytestmark = [pytest.mark.net, pytest.mark.slow]

FILES = {"config.json": b"{}", "model.safetensors": bytes(24 * 2**20)}


def test_a_download_shows_bar_bytes_and_time_left(tmp_path: Path) -> None:
    port = unused_port()
    preset = Preset(name="far", model=ModelSpec(id=hub.MODEL), server=ServerSpec(port=port))
    file = tmp_path / "far.json"
    file.write_bytes(msgspec.json.encode(preset))
    with hub.serving(FILES) as here:
        env = os.environ | here.env(tmp_path / "hub") | {"MLX_STACK_HOME": str(tmp_path / "home")}
        worker = subprocess.Popen(
            [*CLI, "serve", str(file)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            frame = asyncio.run(downloading(f"http://127.0.0.1:{port}"))
        finally:
            worker.kill()
            worker.wait()
    assert frame.loading is not None
    assert (frame.loading.model, frame.loading.n_total) == (
        hub.MODEL,
        sum(map(len, FILES.values())),
    )
    (line,) = health(DashboardState(frame=frame), 120)
    told = "".join(cell.text for cell in line)
    assert re.fullmatch(r"downloading org/tiny █+░+ [\d.]+/24.0 MiB, \d+s so far, ETA \d+s", told)


async def downloading(url: str) -> StatusFrame:
    """The first frame that tells of bytes of the weights."""
    async with Client(url) as client, aclosing(LiveFeed(client).news()) as feed:
        async for news in feed:
            load = news.loading if isinstance(news, StatusFrame) else None
            if load and load.is_download and 2**20 < load.n_done < load.n_total:
                assert isinstance(news, StatusFrame)
                return news
    raise AssertionError("the feed ended")
