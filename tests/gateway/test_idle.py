"""Idle unload behind a gateway: its address answers on, status wakes nothing, a request does."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from msgspec.structs import replace

from mlxstack.api import swap_middleware
from mlxstack.core.preset import ServerSpec
from mlxstack.gateway import members
from mlxstack.gateway.members import MemberPhase
from mlxstack.service.calls import idle_unload
from mlxstack.service.service import ServiceHealth
from tests.api.running import Running, running, tiny_preset
from tests.gateway.gateway_thread import behind, in_front
from tests.gateway.real_members import until
from tests.gateway.test_loading import SAID, STREAMS
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

READS = (
    "/", "/health", "/v1/models", "/models", "/models/tiny", "/props", "/metrics", "/slots",
    "/metrics?model=tiny", "/api/tags", "/api/ps", "/api/version", "/api/v0/models",
    "/api/v0/models/tiny", "/api/v1/models",
)  # fmt: skip
IDLE_S = 0.3
SERVER = ServerSpec(port=0, idle_unload_s=IDLE_S)


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("idle")
    preset = tiny_preset(folder / "model", server=behind(SERVER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle_unload, "LOOK_S", 0.02)
        patch.setattr(members, "WATCH_S", 0.05)
        with running(preset, folder / "home") as live:
            yield live


@pytest.fixture(scope="module")
def fronted(member: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("front")
    with in_front(SERVER, member.url, "tiny", folder, is_loaded=False) as front:
        yield replace(member, url=front.url)


@pytest.fixture
def http(fronted: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fronted.url, timeout=PATIENCE_S) as client:
        yield client


def is_unloaded(fronted: Running) -> bool:
    return fronted.service.health is ServiceHealth.UNLOADED


def state(http: httpx.Client) -> str:
    (card,) = http.get("/v1/models").json()["data"]
    return str(card["status"]["value"])


def read_all(http: httpx.Client) -> None:
    for path in READS:
        assert http.get(path).status_code == 200, path
    assert http.post("/api/show", json={"model": "tiny"}).status_code == 200
    assert http.post("/api/pull", json={"model": "tiny"}).status_code == 200


def test_status_calls_neither_wake_nor_keep_it(fronted: Running, http: httpx.Client) -> None:
    http.post("/api/generate", json={"model": "tiny", "keep_alive": IDLE_S}).raise_for_status()

    def is_unloaded_though_asked() -> bool:
        read_all(http)
        return is_unloaded(fronted)

    until(is_unloaded_though_asked, "asking for its state keeps it in memory")
    assert state(http) == "unloaded"
    assert 'mlxstack_gateway_loaded{member="tiny"} 0.0' in http.get("/metrics").text
    assert http.get("/api/ps").json()["models"] == []
    assert http.get("/api/v0/models/tiny").json()["state"] == "not-loaded"
    assert http.get("/api/v1/models").json()["models"][0]["loaded_instances"] == []
    for _ in range(5):
        read_all(http)
        assert is_unloaded(fronted)


def test_a_member_that_unloads_itself_frees_its_reservation(
    fronted: Running, http: httpx.Client
) -> None:
    body = {"model": "tiny", "messages": SAID, "max_tokens": 2}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    assert http.get("/health").json()["members"] == {"tiny": "loaded"}
    until(lambda: http.get("/health").json()["members"] == {"tiny": "unloaded"}, "it stays")
    assert is_unloaded(fronted) and http.get("/props").json()["is_sleeping"]


def test_another_gateway_finds_it_unloaded_and_leaves_it_so(
    fronted: Running, member: Running, tmp_path: Path
) -> None:
    until(lambda: is_unloaded(fronted), "it stays")
    with (
        in_front(SERVER, member.url, "tiny", tmp_path, is_loaded=False) as front,
        httpx.Client(base_url=front.url, timeout=PATIENCE_S) as http,
    ):
        until(lambda: front.member.is_running, "it is not found")
        assert front.member.phase is MemberPhase.UNLOADED
        assert http.get("/health").json()["members"] == {"tiny": "unloaded"}
        assert http.get("/props").json()["is_sleeping"] and state(http) == "unloaded"
        assert is_unloaded(fronted) and front.member.n_loads == 0
        body = {"model": "tiny", "messages": SAID, "max_tokens": 2}
        http.post("/v1/chat/completions", json=body).raise_for_status()
        assert front.member.n_loads == 1 and not is_unloaded(fronted)


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_wakes_it_with_heartbeats(
    fronted: Running, http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.001)
    monkeypatch.setattr(swap_middleware, "BEAT_S", 0.005)
    http.post("/api/generate", json={"model": "tiny", "keep_alive": 0}).raise_for_status()
    until(lambda: is_unloaded(fronted), "it stays")
    body, beat, last = STREAMS[path]
    short = {"max_output_tokens": 16} if path == "/v1/responses" else {
        "max_tokens": 4, "n_predict": 4, "options": {"num_predict": 4},
    }  # fmt: skip
    answer = http.post(path, json={**body, **short})
    assert answer.status_code == 200 and answer.text.startswith(beat), answer.text
    assert last in answer.text.replace("response.incomplete", "response.completed")
    assert state(http) == "loaded"


def test_keep_alive_is_honored(fronted: Running) -> None:
    with ollama.Client(fronted.url, timeout=PATIENCE_S) as client:
        client.chat("tiny", SAID, keep_alive=-1, options={"num_predict": 2})
        (loaded,) = client.ps().models
        assert loaded.expires_at and loaded.expires_at.year > 2200
        client.chat("tiny:latest", SAID, keep_alive="1h30m", options={"num_predict": 2})
        (loaded,) = client.ps().models
        assert loaded.expires_at and 5000 < loaded.expires_at.timestamp() - time.time() < 5500
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        until(lambda: not client.ps().models, "it stays")
        assert client.generate("tiny").done_reason == "load"
        assert client.ps().models


def test_many_that_wait_are_all_answered(fronted: Running, http: httpx.Client) -> None:
    http.post("/api/generate", json={"model": "tiny", "keep_alive": 0}).raise_for_status()
    until(lambda: is_unloaded(fronted), "it stays")

    async def scene() -> list[int]:
        async with httpx.AsyncClient(base_url=fronted.url, timeout=PATIENCE_S) as client:
            body = {"model": "tiny", "messages": SAID, "max_tokens": 2}
            asked = (client.post("/v1/chat/completions", json=body) for _ in range(6))
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    assert asyncio.run(scene()) == [200] * 6
