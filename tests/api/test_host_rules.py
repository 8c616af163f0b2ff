"""One rule decides whether a page is let in, may read the answer, and gets its preflight."""

import socket
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import httpx
import pytest
from msgspec import Struct

from mlxstack.core.preset import ServerSpec
from tests.api.running import serving, standing
from tests.gateway.gateway_thread import WAYS, standing_behind
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
LOOPBACK_PAGES = (
    "http://localhost:3000", "https://localhost", "http://127.0.0.1:8080", "http://[::1]:5173",
    "http://0.0.0.0:3000",
    "http://tauri.localhost", "https://tauri.localhost", "https://mac.lan", "https://MAC.lan:8443",
)  # fmt: skip
APPS = (
    "capacitor://localhost", "ionic://localhost", "tauri://localhost", "app://obsidian.md",
    "app://-", "file://", "vscode-webview://1a2b3c", "vscode-file://vscode-app",
)  # fmt: skip
STRANGERS = (
    "null", "", "https://evil.com", "http://localhost.evil.com", "http://evil.com:11434",
    "chrome-extension://abcdefgh", "moz-extension://1-2-3", "safari-web-extension://A-B",
    "capacitor://evil.com", "evil-app://x", "http://app://evil.com", "http://evil.com@localhost",
    "http://192.168.1.66", "http://[evil", "http://", "localhost", "https://mac.lan.evil.com",
    "devtools://devtools", "about:blank", "data:text/html,x",
)  # fmt: skip
SCHEMES = (
    "http", "https", "ws", "app", "file", "tauri", "capacitor", "ionic", "electron", "x",
    "vscode-webview", "chrome-extension",
)  # fmt: skip
NAMES = ("localhost", "a.localhost", "127.0.0.1", "[::1]", "mac.lan", "evil.com", "10.0.0.5", "")
PORTS = ("", ":80", ":65535")
GENERATED = [f"{scheme}://{name}{port}" for scheme, name, port in product(SCHEMES, NAMES, PORTS)]


class Page(Struct, frozen=True):
    """A client that sends the Origin of a page."""

    http: httpx.Client
    engine: StandIn

    def send(self, method: str, path: str, origin: str, **more: object) -> httpx.Response:
        headers = {"origin": origin, "content-type": "application/json"}
        return self.http.request(method, path, headers=headers, **more)  # type: ignore[arg-type]

    def preflight(self, path: str, origin: str, host: str | None = None) -> httpx.Response:
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-os",
            "access-control-request-private-network": "true",
            **({"host": host} if host else {}),
        }
        return self.http.options(path, headers=headers)


@pytest.fixture(scope="module", params=WAYS)
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    spec = ServerSpec(port=0, allowed_hosts=("mac.lan",), max_body_bytes=2000)
    folder = tmp_path_factory.mktemp("page")
    with (
        standing_behind(request.param, spec, folder) as (found, engine),
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        yield Page(http, engine)


def is_readable(answer: httpx.Response, origin: str) -> bool:
    """Whether a browser shows the answer to the page."""
    allowed = answer.headers.get_list("access-control-allow-origin")
    assert allowed in ([], [origin])
    return bool(allowed)


def rule(page: Page, origin: str) -> tuple[bool, bool, bool]:
    """Whether the origin is let in, may read the answer, and gets its preflight."""
    answer = page.send("GET", "/v1/models", origin)
    preflight = page.preflight(CHAT, origin)
    assert is_readable(preflight, origin) is (preflight.status_code == 200)
    return answer.status_code == 200, is_readable(answer, origin), preflight.status_code == 200


@pytest.mark.parametrize("origin", [*LOOPBACK_PAGES, *APPS])
def test_a_page_that_is_let_in_reads_and_gets_its_preflight(page: Page, origin: str) -> None:
    assert rule(page, origin) == (True, True, True)


@pytest.mark.parametrize("origin", STRANGERS)
def test_a_stranger_is_refused_in_all_three(page: Page, origin: str) -> None:
    assert rule(page, origin) == (False, False, False)


def test_every_origin_has_one_answer(page: Page) -> None:
    answers = {origin: rule(page, origin) for origin in GENERATED}
    assert [one for one, answer in answers.items() if len(set(answer)) > 1] == []
    assert {answer[0] for answer in answers.values()} == {True, False}


def test_a_page_of_the_address_itself_has_one_answer(page: Page) -> None:
    for host, is_let_in in (("192.168.1.7:7109", True), ("evil.com", False)):
        origin = f"http://{host.partition(':')[0]}:3000"
        headers = {"origin": origin, "host": host}
        answer = page.http.get("/v1/models", headers=headers)
        assert (answer.status_code == 200) is is_readable(answer, origin) is is_let_in
        assert (page.preflight(CHAT, origin, host).status_code == 200) is is_let_in


def test_a_preflight_allows_what_was_asked(page: Page) -> None:
    origin = "capacitor://localhost"
    for path in (CHAT, "/v1/messages", "/api/chat", "/nope"):
        answer = page.preflight(path, origin)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["vary"] == "Origin"
        assert answer.headers["access-control-allow-private-network"] == "true"
        assert answer.headers["x-request-id"].startswith("req_")
        allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
        assert {"GET", "POST", "PUT", "DELETE"} <= {
            *answer.headers["access-control-allow-methods"].split(", ")
        }
        assert b"Access-Control-Allow-Origin" in {name for name, _ in answer.headers.raw}


def test_a_refused_preflight_has_the_error_of_its_api(page: Page) -> None:
    answer = page.preflight("/v1/messages", "https://evil.com")
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "access-control-allow-private-network" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b"{}", 400),
        ("GET", "/nope", None, 404),
        ("GET", CHAT, None, 405),
        ("POST", CHAT, b"x" * 3000, 413),
        ("POST", "/v1/messages", b"x" * 3000, 413),
        ("POST", "/api/chat", b"{}", 200),
    ],
)
def test_errors_are_readable(
    page: Page, method: str, path: str, content: bytes | None, status: int
) -> None:
    origin = "app://obsidian.md"
    answer = page.send(method, path, origin, content=content)
    assert answer.status_code == status
    assert is_readable(answer, origin)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
def test_streams_are_readable(page: Page, path: str) -> None:
    page.engine.script = page.engine.tokenizer.encode("Fine.", add_special_tokens=False)
    body = {**HELLO, "stream": True, "max_tokens": 9}
    answer = page.send("POST", path, "ionic://localhost", json=body)
    assert answer.status_code == 200 and is_readable(answer, "ionic://localhost")
    exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-mlx-stack-slot", "request-id", "retry-after"} <= set(exposed)


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_key_is_readable(way: str, tmp_path: Path) -> None:
    with standing_behind(way, ServerSpec(port=0, api_keys=("k",)), tmp_path) as (found, _):
        for path in (CHAT, "/v1/messages"):
            headers = {"origin": "tauri://localhost"}
            answer = httpx.post(found.url + path, json=HELLO, headers=headers)
            assert answer.status_code == 401
            assert is_readable(answer, headers["origin"])


def test_a_failure_of_the_service_is_readable() -> None:
    service, engine = standing(ServerSpec(port=0))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener, is_loaded=False) as found,
    ):
        headers = {"origin": "http://localhost:3000"}
        loading = httpx.post(found.url + CHAT, json=HELLO, headers=headers)
        assert loading.status_code == 503
        assert is_readable(loading, headers["origin"])
        engine.loading.set_result(FACTS)


def test_a_star_lets_every_page_in_and_read() -> None:
    service, engine = standing(ServerSpec(port=0, allowed_hosts=("*",)))
    engine.loading.set_result(FACTS)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        httpx.Client(base_url=found.url) as http,
    ):
        page = Page(http, engine)
        for origin in ("https://any.example", "chrome-extension://abc", "capacitor://any"):
            assert rule(page, origin) == (True, True, True)
        for origin in ("null", ""):
            assert rule(page, origin) == (False, False, False)
