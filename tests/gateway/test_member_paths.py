"""Paths that reach a member: those of its routes but for changes of models, in every spelling."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from mlxstack.api.app import create_app
from mlxstack.core.errors import NotFound, WrongMethod
from mlxstack.core.preset import ApiKey, ServerSpec
from mlxstack.gateway.member_paths import BY_PATH, CHANGES, require_forwarded
from tests.api.running import Running, standing
from tests.gateway.gateway_thread import standing_behind
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

KEY = {"authorization": "Bearer whole"}
SPELLINGS = [
    "/v1/models/load",
    "/v1/models/load?model=standin",
    "//v1/models/load",
    "/v1//models///load/",
    "/v1/./models/load",
    "/v1/x/../models/load",
    "/v1%2Fmodels%2Fload",
    "/v1/models%2fload?model=standin",
    "/%76%31/models/load",
    "http://localhost/v1/models/load?model=standin",
]


def test_the_forwarded_paths_are_the_routes_of_a_service() -> None:
    app = create_app(standing(ServerSpec(port=0))[0])
    for route in app.routes:
        path = route.path_format
        methods = set(route.methods) - {"OPTIONS"}
        if path in CHANGES:
            with pytest.raises(NotFound):
                require_forwarded("POST", path)
            continue
        assert methods
        for method in methods:
            require_forwarded(method, path.replace("{", "").replace("}", ""))
        with pytest.raises(WrongMethod):
            require_forwarded("PATCH", path)
    served = {route.path_format for route in app.routes}
    assert {path for path in BY_PATH if "{" not in path} <= served


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = (ApiKey("whole"), ApiKey("bobs", agents=("bob",)))
    server = ServerSpec(port=0, api_keys=keys)
    with standing_behind("gateway", server, tmp_path_factory.mktemp("paths")) as (live, _):
        yield live


def status_of(gateway: Running, method: str, target: str, key: str = "whole") -> int:
    """Status of a request whose target no client library rewrites."""
    parts = urlsplit(gateway.url)
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    body = b'{"preset": "demo"}'
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as client:
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        client.sendall((head + length).encode() + body)
        return int(client.recv(65536).split(b" ")[1])


@pytest.mark.parametrize("target", SPELLINGS)
def test_no_spelling_of_a_change_of_models_reaches_a_member(gateway: Running, target: str) -> None:
    assert status_of(gateway, "POST", target) == 501
    assert status_of(gateway, "POST", target.replace("load", "unload")) == 501
    assert status_of(gateway, "POST", target, "bobs") == 403
    assert status_of(gateway, "POST", target, "guessed") == 401


@pytest.mark.parametrize(
    "target",
    ["/v1/agents/ann/history", "/v1/agents/bob%2F..%2Fann/history", "/v1//agents/./ann/history"],
)
def test_no_spelling_of_an_agent_passes_its_key(gateway: Running, target: str) -> None:
    assert status_of(gateway, "GET", target, "bobs") == 403


def test_a_path_of_no_member_is_refused_by_the_gateway(gateway: Running) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/V1/agents/bob", 404),
        ("POST", "/v1/models/load/now", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/slots/0", 405),
    ):
        refused = httpx.request(method, gateway.url + path, headers=KEY)
        assert refused.status_code == status, path
        assert (status == 405) == ("allow" in refused.headers)


def test_a_member_sees_the_path_by_which_it_was_chosen(gateway: Running, tmp_path: Path) -> None:
    assert status_of(gateway, "POST", "//v1/./chat/x/../completions/input_tokens") == 400
    assert status_of(gateway, "GET", "/props?model=standin") == 200
