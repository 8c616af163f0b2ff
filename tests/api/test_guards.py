"""Who may come in: keys, host names, and nobody before the model is loaded."""

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from litestar.connection import ASGIConnection

from mlxstack.api.host_rules import host_check
from mlxstack.core.errors import Forbidden
from mlxstack.core.preset import ApiKey, ServerSpec, Tier
from mlxstack.core.request import Priority
from tests.api.running import Running, running, serving, standing, tiny_preset
from tests.gateway.gateway_thread import WAYS, running_behind, standing_behind
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = ("key-one", "key-two")
MACHINE = socket.gethostname().partition(".")[0]


@pytest.fixture(scope="module", params=WAYS)
def locked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A loaded service that wants a key, knows one more host, and is strict about models."""
    spec = ServerSpec(port=0, api_keys=KEYS, allowed_hosts=("mac.lan",), strict_models=True)
    with standing_behind(request.param, spec, tmp_path_factory.mktemp("locked")) as (found, _):
        yield found


def ask(running: Running, path: str = "/props", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(running.url + path, headers=named)


def test_x11_a_key_opens_in_either_header(locked: Running) -> None:
    assert ask(locked).status_code == 401
    assert ask(locked, authorization="Bearer key-one").status_code == 200
    assert ask(locked, authorization="bearer key-two").status_code == 200
    assert ask(locked, x_api_key="key-two").status_code == 200
    assert ask(locked, x_api_key="key-three").status_code == 401
    assert ask(locked, authorization="Basic key-one").status_code == 401
    odd = {"x-api-key": "schlüssel".encode()}
    assert httpx.get(locked.url + "/props", headers=odd).status_code == 401


def test_x11_the_dialect_decides_between_two_keys(locked: Running) -> None:
    both = {"authorization": "Bearer key-one", "x_api_key": "wrong"}
    assert ask(locked, **both).status_code == 200
    # A service has no such route, and a gateway asks for the key first.
    assert ask(locked, "/v1/messages", **both).status_code in {401, 405}
    said = {**HELLO, "model": "standin", "max_tokens": 1}
    for right, status in (("x-api-key", 200), ("authorization", 401)):
        keys = {"authorization": "Bearer wrong", "x-api-key": "wrong"}
        keys[right] = keys[right].replace("wrong", "key-one")
        answer = httpx.post(locked.url + "/v1/messages", json=said, headers=keys)
        assert answer.status_code == status, right


def test_x11_some_paths_are_public(locked: Running) -> None:
    for path in ("/", "/health", "/v1/health", "/models", "/v1/models"):
        assert ask(locked, path).status_code == 200, path
    assert httpx.head(locked.url).status_code == 200
    for path in ("/slots", "/metrics", "/props"):
        assert ask(locked, path).status_code == 401, path


def test_a_missing_key_is_told_in_the_sdk_words(locked: Running) -> None:
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.chat.completions.create(model="standin", messages=HELLO["messages"])  # type: ignore[arg-type]
    assert refused.value.code == "invalid_api_key"


def test_o9_a_strict_service_serves_only_its_own_names(locked: Running) -> None:
    headers = {"x-api-key": "key-one"}
    answer = httpx.post(locked.url + CHAT, json={**HELLO, "model": "gpt-9"}, headers=headers)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    answer = httpx.post(locked.url + CHAT, json={**HELLO, "model": "standin"}, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("agent.localhost:1", 200),
        ("127.0.0.1:80", 200),
        ("192.168.1.7:7109", 200),
        ("[::1]:7109", 200),
        ("mac.lan:7109", 200),
        ("host.docker.internal:7109", 200),
        ("Host.Containers.Internal", 200),
        (f"{MACHINE}.local:7109", 200),
        ("host.docker.internal.evil.com", 403),
        ("evil.docker.internal", 403),
        (f"{MACHINE}.local.evil.com", 403),
        ("other-machine.local", 403),
        ("evil.com", 403),
        ("localhost.evil.com", 403),
        ("mac.lan.evil.com", 403),
        ("127.0.0.1.evil.com", 403),
        ("[::1%evil.com]", 403),
        ("[evil", 403),
    ],
)
def test_hosts_against_dns_rebinding(locked: Running, host: str, expected: int) -> None:
    answer = ask(locked, "/health", host=host)
    assert answer.status_code == expected
    assert expected == 200 or answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("peer", "is_let_in"),
    [
        ("127.0.0.1", True),
        ("172.17.0.2", True),
        ("::ffff:172.17.0.2", True),
        ("fe80::1%eth0", True),
        ("93.184.216.34", False),
        ("2606:2800:220:1::1", False),
    ],
)
def test_names_of_this_machine(peer: str, is_let_in: bool) -> None:
    check = host_check(ServerSpec(allowed_hosts=("mac.lan",)))

    def request(**headers: str) -> ASGIConnection[Any, Any, Any, Any]:
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "headers": pairs, "client": (peer, 1), "path": "/"}
        return ASGIConnection(scope)  # type: ignore[arg-type]

    for host in ("host.docker.internal:7109", f"{MACHINE}.local"):
        if is_let_in:
            check(request(host=host))
        else:
            with pytest.raises(Forbidden):
                check(request(host=host))
        with pytest.raises(Forbidden):
            check(request(host=host, origin=f"http://{host}"))
    check(request(host="mac.lan", origin="http://mac.lan"))


@pytest.mark.parametrize("host", ["::1%/evil", "localhost:99999999"])
def test_a_host_that_makes_no_url_is_no_fault(locked: Running, host: str) -> None:
    headers = {"host": host, "x-api-key": "key-one"}
    answer = httpx.post(locked.url + CHAT, json={**HELLO, "model": "standin"}, headers=headers)
    assert answer.status_code < 500
    assert answer.json().keys() & {"error", "choices"}


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://mac.lan", 200),
        ("vscode-webview://abc", 200),
        ("http://evil.com", 403),
        ("http://localhost.evil.com", 403),
        ("http://192.168.1.66", 403),
        ("null", 403),
        ("", 403),
        ("http://[evil", 403),
        ("http://[localhost]", 403),
    ],
)
def test_origins_of_foreign_pages(locked: Running, origin: str, expected: int) -> None:
    answer = ask(locked, "/health", origin=origin)
    assert answer.status_code == expected
    assert expected == 200 or answer.json()["error"]["type"] == "permission_error"


def test_x10_preflights(locked: Running) -> None:
    def preflight(origin: str) -> httpx.Response:
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key, content-type",
            "access-control-request-private-network": "true",
        }
        return httpx.options(locked.url + CHAT, headers=headers)

    answer = preflight("http://localhost:3000")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert "x-api-key" in answer.headers["access-control-allow-headers"].lower()
    assert b"Access-Control-Allow-Origin" in {name for name, _ in answer.headers.raw}
    for origin in ("app://obsidian.md", "tauri://localhost", "vscode-webview://abc"):
        assert preflight(origin).headers["access-control-allow-origin"] == origin
        page = ask(locked, "/health", origin=origin)
        assert page.headers["access-control-allow-origin"] == origin
    for origin in ("http://evil.com", "http://app://evil.com", "evil-app://x"):
        assert "access-control-allow-origin" not in preflight(origin).headers
        assert "access-control-allow-private-network" not in preflight(origin).headers
    page = ask(locked, "/health", origin="http://localhost:3000")
    assert page.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "x-mlx-stack-slot" in page.headers["access-control-expose-headers"].lower()


def test_everything_answers_503_while_the_model_loads() -> None:
    service, engine = standing(ServerSpec(port=0))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener, is_loaded=False) as found,
    ):
        calls: list[tuple[str, str, Any]] = [
            ("GET", "/health", None), ("GET", "/props", None), ("GET", "/slots", None),
            ("GET", "/v1/models", None), ("POST", CHAT, HELLO), ("POST", CHAT, {"bad": 1}),
            ("POST", "/completion", {"prompt": "x"}), ("POST", "/slots/0?action=erase", None),
        ]  # fmt: skip
        for method, path, body in calls:
            answer = httpx.request(method, found.url + path, json=body)
            assert answer.status_code == 503, path
            assert answer.json()["error"]["message"] == "Loading model"
            assert "retry-after" in answer.headers
        assert httpx.get(found.url).json()["status"] == "loading"
        engine.loading.set_result(FACTS)
        for _ in range(500):
            if httpx.get(found.url + "/health").status_code == 200:
                break
        assert httpx.post(found.url + CHAT, json=HELLO).status_code == 200


def test_e18_a_full_queue_is_503_before_the_stream() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.is_full = True
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        for is_stream in (False, True):
            answer = httpx.post(found.url + CHAT, json={**HELLO, "stream": is_stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "3"
            assert answer.json()["error"]["code"] == "overloaded"


def test_o6_a_failure_inside_a_stream_is_told_in_it() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = None
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model="m",
            messages=HELLO["messages"],  # type: ignore[arg-type]
            stream=True,
        )
        chunks = iter(stream)
        assert next(chunks).choices[0].delta.role == "assistant"
        engine.is_dead = True
        with pytest.raises(openai.APIError, match="died"):
            list(chunks)


@pytest.mark.parametrize("way", WAYS)
def test_a_body_over_the_limit_is_413(way: str, tmp_path: Path) -> None:
    # Litestar's own check comes after the whole body has been read.
    spec = ServerSpec(port=0, max_body_bytes=1000, max_bodies_bytes=1500)
    with standing_behind(way, spec, tmp_path) as (found, engine):
        body = json.dumps({**HELLO, "filler": "x" * 2000}).encode()
        # An iterator is sent in chunks, without a length.
        for content in (body, iter([body])):
            answer = httpx.post(found.url + CHAT, content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not engine.asked


class Tiered(NamedTuple):
    """A service with keys of every kind, and the asks that reached its engine."""

    url: str
    engine: StandIn

    def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        said = {"messages": HELLO["messages"], "max_tokens": 1, **body}
        return httpx.post(self.url + path, json=said, headers={"x-api-key": key})


@pytest.fixture(scope="module", params=WAYS)
def tiered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    digest = "sha256:" + hashlib.sha256(b"fast").hexdigest()
    keys = (
        "plain",
        ApiKey(digest, Tier.HIGH),
        ApiKey("slow", Tier.LOW, salt="slow's", agents=("night-*",)),
    )
    spec = ServerSpec(port=0, api_keys=keys)
    folder = tmp_path_factory.mktemp("tiered")
    with standing_behind(request.param, spec, folder) as (found, engine):
        yield Tiered(found.url, engine)


@pytest.mark.parametrize(
    ("key", "path", "priority"),
    [
        ("plain", CHAT, Priority.NORMAL),
        ("fast", CHAT, Priority.HIGH),
        ("slow", CHAT, Priority.LOW),
        ("fast", "/v1/batch/chat/completions", Priority.LOW),
        ("fast", "/v1/batch/messages", Priority.LOW),
        ("fast", "/v1/messages", Priority.HIGH),
    ],
)
def test_e9_priority_comes_from_key_and_endpoint_and_never_from_the_body(
    tiered: Tiered, key: str, path: str, priority: Priority
) -> None:
    assert tiered.post(path, key, priority="high", tier="high").status_code == 200
    assert tiered.engine.asked[-1].priority is priority


def test_e9_an_agent_is_not_made_more_urgent_than_the_key(tmp_path: Path) -> None:
    keys = ("plain", ApiKey("fast", Tier.HIGH))
    preset = tiny_preset(tmp_path / "model", server=ServerSpec(port=0, api_keys=keys))
    with running(preset, tmp_path / "home") as found:
        there = found.url + "/v1/agents/somebody"
        change = {"priority": "high"}
        plain, fast = ({"x-api-key": key} for key in ("plain", "fast"))
        httpx.post(found.url + "/v1/agents", json={"id": "somebody"}, headers=plain)
        refused = httpx.post(there, json=change, headers=plain)
        assert refused.status_code == 403
        assert "tier normal" in refused.text
        assert httpx.post(there, json=change, headers=fast).json()["priority"] == "high"


@pytest.mark.parametrize("way", WAYS)
def test_without_keys_agents_get_any_priority_and_requests_the_normal_one(
    way: str, tmp_path: Path
) -> None:
    server = ServerSpec(port=0)
    preset = tiny_preset(tmp_path / "model", server=server)
    with running_behind(way, preset, tmp_path) as found:
        httpx.post(found.url + "/v1/agents", json={"id": "somebody"}).raise_for_status()
        there = found.url + "/v1/agents/somebody"
        assert httpx.post(there, json={"priority": "high"}).json()["priority"] == "high"
    with standing_behind(way, server, tmp_path / "standing") as (standing_in, engine):
        told = {**HELLO, "max_tokens": 1}
        assert httpx.post(standing_in.url + CHAT, json=told).status_code == 200
        assert engine.asked[-1].priority is Priority.NORMAL


def test_d23_a_key_keeps_its_kv_apart(tiered: Tiered) -> None:
    def salt(key: str, **more: str) -> str:
        assert tiered.post(CHAT, key, **more).status_code == 200
        return tiered.engine.asked[-1].salt

    assert salt("plain") == ""
    slow = salt("slow"), salt("slow", cache_salt="x")
    forged = "x", "slow's", "slow's\n", "slow's\nx", *slow
    plain = tuple(salt("plain", cache_salt=text) for text in forged)
    assert len({"", *slow, *plain}) == 1 + len(slow) + len(plain)


def test_a_key_speaks_only_as_its_agents(tiered: Tiered) -> None:
    assert tiered.post(CHAT, "slow", agent="night-1").status_code == 200
    refused = tiered.post(CHAT, "slow", agent="day")
    assert refused.status_code == 403
    assert "night-*" in refused.json()["error"]["message"]
    there = tiered.url + "/v1/agents/day"
    assert httpx.get(there, headers={"x-api-key": "slow"}).status_code == 403


@pytest.mark.parametrize("way", WAYS)
def test_a_key_sees_and_makes_only_its_agents(way: str, tmp_path: Path) -> None:
    keys = ("plain", ApiKey("slow", Tier.LOW, agents=("night-*",)))
    preset = tiny_preset(tmp_path / "model", server=ServerSpec(port=0, api_keys=keys))
    with running_behind(way, preset, tmp_path) as found:
        there = found.url + "/v1/agents"
        plain, slow = ({"x-api-key": key} for key in ("plain", "slow"))
        httpx.post(there, json={"id": "day"}, headers=plain).raise_for_status()
        httpx.post(there, json={"id": "night-1"}, headers=slow).raise_for_status()
        assert httpx.post(there, json={"id": "noon"}, headers=slow).status_code == 403
        fork = httpx.post(f"{there}/night-1/fork", json={"id": "noon"}, headers=slow)
        assert fork.status_code == 403
        seen = {one["id"] for one in httpx.get(there, headers=slow).json()["data"]}
        assert seen == {"night-1"}
        assert len(httpx.get(there, headers=plain).json()["data"]) == 2
        for slot, (agent, headers) in enumerate((("day", plain), ("night-1", slow))):
            said = {**HELLO, "agent": agent, "max_tokens": 1, "id_slot": slot}
            httpx.post(found.url + CHAT, json=said, headers=headers).raise_for_status()
        names = [
            {slot.get("agent") for slot in httpx.get(found.url + "/slots", headers=headers).json()}
            for headers in (plain, slow)
        ]
        assert names == [{None, "day", "night-1"}, {None, "night-1"}]


@pytest.mark.parametrize("path", ["/requests", "/requests/day", "/cache", "/events"])
def test_a_key_of_some_agents_does_not_read_what_all_say(tiered: Tiered, path: str) -> None:
    assert tiered.post(CHAT, "plain", agent="day").status_code == 200
    refused = httpx.get(tiered.url + path, headers={"x-api-key": "slow"})
    assert refused.status_code == 403
    assert "night-*" in refused.json()["error"]["message"]
    seen = httpx.get(tiered.url + "/requests", headers={"x-api-key": "plain"})
    assert "day" in {one["agent"] for one in seen.json()}


ACTS = [
    ("POST", "/slots/0?action=erase"), ("POST", "/cache/clear"), ("POST", "/cache/gc"),
    ("POST", "/cache/warm"), ("POST", "/cache/prefixes"), ("DELETE", "/cache/prefixes/rules"),
    ("POST", "/v1/models/load"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ACTS)
def test_a_key_of_some_agents_does_nothing_to_all(tiered: Tiered, method: str, path: str) -> None:
    def call(key: str) -> httpx.Response:
        return httpx.request(method, tiered.url + path, json=[], headers={"x-api-key": key})

    refused = call("slow")
    assert refused.status_code == 403
    assert "concerns all agents" in refused.json()["error"]["message"]
    assert call("plain").status_code != 403


@pytest.mark.parametrize("way", WAYS)
def test_a_key_of_some_agents_does_not_read_what_others_said(way: str, tmp_path: Path) -> None:
    keys = ("plain", ApiKey("slow", agents=("night-*",)))
    preset = tiny_preset(tmp_path / "model", server=ServerSpec(port=0, api_keys=keys))
    plain, slow = ({"x-api-key": key} for key in ("plain", "slow"))
    shared = "We share this long beginning of every word that we say. " * 4
    with running_behind(way, preset, tmp_path) as found:
        for agent, headers, text in (("day", plain, "sesame"), ("night-1", slow, "nothing")):
            turn = {"role": "user", "content": f"{shared}The secret is {text}, do not tell."}
            # A first turn would be a new conversation, of which no difference is told.
            later = [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Good."}]
            said = {"messages": [turn, *later], "agent": agent, "max_tokens": 1}
            httpx.post(found.url + CHAT, json=said, headers=headers).raise_for_status()
        there = found.url + "/v1/agents/night-1"
        whole, own = (httpx.get(there, headers=who).json()["miss"] for who in (plain, slow))
        assert "sesame" in whole["text_cached"]
        assert own == {**whole, "text_cached": "", "age_s": own["age_s"]}
        listed = httpx.get(found.url + "/v1/agents", headers=slow).json()["data"]
        assert [one["miss"]["text_cached"] for one in listed] == [""]


def test_a_digest_is_no_key(tiered: Tiered) -> None:
    digest = "sha256:" + hashlib.sha256(b"fast").hexdigest()
    assert tiered.post(CHAT, digest).status_code == 401
