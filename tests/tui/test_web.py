"""The dashboard as a page: its rules, and a real Chromium at a live service."""

import base64
import gc
import os
import re
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer
from msgspec import structs

from mlxstack.cli import web_dashboard
from mlxstack.cli.commands import tui
from mlxstack.cli.exit_codes import Misuse
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ServerSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S, until
from tests.tui.browser import CHROMIUM, chromium

# textual-serve leaves pipes open, which the collector may find in the middle of a test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEY = "sk-of-the-dashboard"
AGENTS = ("ann", "bob", "cyd", "dan", "eve")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the pipes of dashboards here, which textual-serve leaves open."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
async def page() -> AsyncIterator[TestClient]:
    """The page of a service that wants a key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = web_dashboard.WebDashboard((), listener, KEY)
        app = await served._make_app()
        async with TestClient(TestServer(app)) as client:
            yield client


def basic(key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f':{key}'.encode()).decode()}"}


@pytest.mark.net
@pytest.mark.parametrize("path", ["/", "/ws", "/static/js/textual.js", "/download/x"])
async def test_the_page_wants_host_origin_and_key_as_the_service_does(
    page: TestClient, path: str
) -> None:
    good = basic(KEY)
    for wrong in (
        {"Host": "rebound.example.com", **good},
        {"Origin": "http://evil.example.com", **good},
        {"Origin": "null", **good},
    ):
        assert (await page.get(path, headers=wrong)).status == 403
    for headers in ({}, basic("another"), {"Authorization": "Basic ?"}, {"Authorization": "x"}):
        refused = await page.get(path, headers=headers)
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"].startswith("Basic ")
    for headers in (good, {"Authorization": f"Bearer {KEY}"}):
        # Chromium opens the socket below.
        if path != "/ws":
            wanted = 404 if path.startswith("/download") else 200
            assert (await page.get(path, headers=headers)).status == wanted


@pytest.mark.net
async def test_dashboards_of_browsers_are_bounded_in_number_and_size(
    page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_dashboard, "MAX_DASHBOARDS", 2)
    key = basic(KEY)
    for width in ("0", "-1", "1001", "1000000", "x"):
        assert (await page.get(f"/ws?width={width}&height=30", headers=key)).status == 400
    held = [await page.ws_connect("/ws?width=100&height=30", headers=key) for _ in range(2)]
    with pytest.raises(WSServerHandshakeError) as refused:
        await page.ws_connect("/ws", headers=key)
    assert refused.value.status == 503
    await held[0].send_json(["resize", {"width": 10**6, "height": 10**6}])
    await held[0].close()
    await until(lambda: dashboard_of(page)._n_dashboards == 1)
    again = await page.ws_connect("/ws", headers=key)
    for socket_of_page in (again, held[1]):
        await socket_of_page.close()
    await until(lambda: dashboard_of(page)._n_dashboards == 0)


def dashboard_of(page: TestClient) -> web_dashboard.WebDashboard:
    """The dashboard behind a client."""
    middleware: Any = page.app.middlewares[-1]  # type: ignore[union-attr]
    found: web_dashboard.WebDashboard = middleware.__self__
    return found


def test_a_size_is_clipped() -> None:
    assert web_dashboard._clipped(10**6, -5) == (web_dashboard.MAX_COLUMNS, 1)


@pytest.mark.net
async def test_the_page_names_its_own_address_and_nothing_from_elsewhere(page: TestClient) -> None:
    answer = await page.get("/", headers={**basic(KEY), "Host": "localhost:9"})
    text = await answer.text()
    assert "ws://localhost:9/ws" in text
    assert not re.search(r"(src|href)=\"(https?:)?//", text)
    assert KEY not in text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} .* choose another --port"):
            web_dashboard.serve((), port, None)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("uv-receipt.toml", "`uv tool install '.[web]'`"),
        ("pipx_metadata.json", "`pipx install --force '.[web]'`"),
        ("pyvenv.cfg", f"`{sys.executable} -m pip install '.[web]'`"),
    ],
)
def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, command: str
) -> None:
    (tmp_path / file).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    monkeypatch.delitem(sys.modules, "mlxstack.cli.web_dashboard")
    monkeypatch.delattr("mlxstack.cli.web_dashboard")
    with pytest.raises(SetupError, match=re.escape(command)):
        tui.tui(replay=tmp_path, web=True)


def test_a_page_keeps_no_recording(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="--record"):
        tui.tui(record=tmp_path / "x", web=True)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Address of `mlx-stack tui --web`."""
    env = {**os.environ, "MLX_STACK_HOME": str(folder), "MLX_STACK_API_KEY": KEY}
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxstack.cli.main", "tui", "--web", "--port", "0", *options],
        stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        told = next(line for line in process.stderr if "http://" in line)
        assert KEY not in told
        yield told.split()[2]
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def ask(url: str, agent: str) -> None:
    body = {
        "messages": [{"role": "user", "content": f"A story about {agent}. " * 8}],
        "max_tokens": 4,
        "session_id": agent,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_saves_erases_and_swaps_at_a_service_with_five_agents(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "presets").mkdir(parents=True, mode=0o700)
    preset = structs.replace(
        tiny_preset(tmp_path / "tiny"), server=ServerSpec(port=0, api_keys=(KEY,))
    )
    (home / "presets" / "other.yaml").write_text(
        f"name: other\nmodel: {{id: {tmp_path / 'tiny'}, alias: other}}\n"
        "slots: {count: 2, n_ctx: 512}\n"
    )
    with (
        running(preset, home) as found,
        served(tmp_path, "--url", found.url) as url,
        chromium(tmp_path / "profile") as browser,
        httpx.Client(base_url=found.url, headers={"x-api-key": KEY}, timeout=PATIENCE_S) as http,
    ):
        with ThreadPoolExecutor(len(AGENTS)) as pool:
            list(pool.map(lambda agent: ask(found.url, agent), AGENTS))
        browser.open(url.replace("//", f"//me:{KEY}@"))
        browser.shows("0 of 3 busy")
        browser.press("3")
        for agent in AGENTS:
            browser.shows(agent)
        browser.press("1", "S")
        browser.shows("to which file?")
        browser.press("Enter")
        browser.shows("written of")
        assert list(home.glob("slots/**/*.kv*"))
        browser.press("E")
        browser.shows("must be computed again")
        browser.press("y")
        browser.shows("tokens erased")
        assert http.get("/slots").json()[0]["n_tokens"] == 0
        browser.press("m")
        browser.shows("Serve which preset")
        browser.press(*"other", "Enter")
        browser.shows("was replaced by")
        assert http.get("/v1/models").json()["data"][0]["id"] == "other"
        picture = browser.screenshot()
        width, height = struct.unpack(">II", picture[16:24])
        assert picture.startswith(b"\x89PNG") and width == 1280 and height > 500
        assert len(picture) > 20_000
        origin = url.partition("//")[2].rstrip("/")
        assert {
            one.partition("//")[2].partition("/")[0].rpartition("@")[2] for one in browser.requests
        } == {origin}
        assert set(browser.statuses) == {200}
