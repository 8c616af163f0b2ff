"""Idle unload: memory comes back, nothing but a request wakes the model, agents go on."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import mlx.core as mx
import msgspec
import ollama
import openai
import psutil
import pytest
from msgspec import structs
from openai.types.responses import ResponseErrorEvent

from mlxstack.api import swap_middleware
from mlxstack.client.types import PropsResponse
from mlxstack.core.preset import ApiKey, Preset, QueueSpec, ServerSpec, ServiceKind, SlotSpec
from mlxstack.engine import device
from mlxstack.service.calls import idle_unload, model_swap
from mlxstack.service.calls.model_swap import SwapStep
from mlxstack.service.engine_factory import CheckedModel
from mlxstack.service.parts.gate import SwapGate
from mlxstack.service.service import Service, ServiceHealth
from tests import models
from tests.api.requests import chat_body
from tests.api.running import TINY, Running, running, tiny_preset
from tests.api.test_agents import RULES, answer_of, cold, history, said, turn, user
from tests.api.test_serve import process, wait_for
from tests.api.test_swap import until
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

# Weights of 35 MB: more than everything else that comes and goes.
BIG = {**TINY, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}
IDLE_S = 0.2
SERVER = ServerSpec(port=0, idle_unload_s=IDLE_S)
TWO = {"num_predict": 2, "temperature": 0}
HELLO = [{"role": "user", "content": "hi"}]
READS = (
    "/", "/health", "/v1/models", "/models", "/props", "/metrics", "/slots", "/api/tags", "/api/ps",
    "/api/version", "/api/v0/models", "/api/v1/models",
)  # fmt: skip


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle_unload, "LOOK_S", 0.02)
        yield


@pytest.fixture(scope="module")
def here(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, quick: None
) -> Iterator[Running]:
    preset = tiny_preset(model_folder, server=SERVER)
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def http(here: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=here.url, timeout=PATIENCE_S) as client:
        yield client


def wait_unloaded(here: Running) -> None:
    asyncio.run(until(lambda: here.service.health is ServiceHealth.UNLOADED))


def test_memory_comes_back(quick: None, tmp_path: Path) -> None:
    models.write(tmp_path / "big", BIG)
    preset = tiny_preset(tmp_path / "big", server=SERVER)
    with running(preset, tmp_path / "home") as here:
        held = here.service.stats.bytes_before_load
        weights = here.service.facts.n_bytes
        wait_unloaded(here)
        assert device.active_bytes() - held < weights / 100
        assert mx.get_cache_memory() < weights / 100
        body = {"messages": HELLO, "stream": False, "options": {"num_predict": 2}}
        httpx.post(f"{here.url}/api/chat", json={**body, "keep_alive": -1}, timeout=PATIENCE_S)
        assert here.service.health is ServiceHealth.OK and device.active_bytes() - held > weights
        httpx.post(f"{here.url}/api/generate", json={"keep_alive": 0}, timeout=PATIENCE_S)
        wait_unloaded(here)
        assert device.active_bytes() - held < weights / 100
    assert not here.service.is_engine_left


def test_resident_memory_comes_back(tmp_path: Path) -> None:
    """Measured in a process of its own, which holds nothing of other tests."""
    models.write(tmp_path / "big", {**BIG, "intermediate_size": 8192})
    preset = tiny_preset(tmp_path / "big", server=ServerSpec(port=unused_port(), idle_unload_s=600))
    url = f"http://127.0.0.1:{preset.server.port}"
    with (
        process(preset, tmp_path) as service,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        wait_for(url)
        resident = psutil.Process(service.pid).memory_info
        weights = (tmp_path / "big" / "model.safetensors").stat().st_size
        after = []
        for _ in range(3):
            http.post("/v1/chat/completions", json=chat_body(max_tokens=2)).raise_for_status()
            loaded = resident().rss
            http.post("/v1/models/unload").raise_for_status()
            after.append(resident().rss)
            assert loaded - after[-1] > weights * 0.7
        # What else a process holds scatters by several MB.
        assert after[-1] - after[1] < weights * 0.3


def test_an_agent_goes_on_as_if_nothing_had_been(http: httpx.Client, here: Running) -> None:
    turn(http, "ann", RULES, user("my word is pear"))
    wait_unloaded(here)
    back = turn(http, "ann", user("which word"))
    assert back["agent"]["cached_tokens"] > 100
    kept = history(http, "ann")
    wait_unloaded(here)
    last = turn(http, "ann", user("and again"))
    assert last["agent"]["cached_tokens"] >= back["agent"]["cached_tokens"]
    assert answer_of(said(last)) == answer_of(cold(http, [*kept, user("and again")]))


def test_an_unload_is_over_once_it_is_answered(http: httpx.Client, here: Running) -> None:
    turn(http, "una", RULES, user("my word is plum"))
    assert http.post("/v1/models/unload").raise_for_status().json()["model"] == "tiny"
    assert here.service.health is ServiceHealth.UNLOADED
    listed = {one["id"]: one for one in http.get("/v1/agents").raise_for_status().json()["data"]}
    assert listed["una"]["bytes"] == http.get("/v1/agents/una").json()["bytes"]
    assert listed["una"]["place"] == "disk" and listed["una"]["bytes"]["disk"] > 0
    assert [one["role"] for one in history(http, "una")] == ["system", "user", "assistant"]
    assert http.get("/requests").raise_for_status().json()[0]["agent"] == "una"
    assert http.get("/requests/una").raise_for_status().json()["agent"] == "una"
    assert here.service.health is ServiceHealth.UNLOADED


def test_status_calls_wake_nothing(http: httpx.Client, here: Running) -> None:
    http.post("/api/generate", json={"keep_alive": -1}).raise_for_status()
    before = {path: http.get(path) for path in READS}
    shown = http.post("/api/show", json={}).json()
    turn(http, "ann", user("hi"))
    counted = http.get("/metrics").text
    wait_unloaded(here)
    with httpx.stream("GET", f"{here.url}/events", timeout=PATIENCE_S) as events:
        frame = next(line for line in events.iter_lines() if line.startswith("data:"))
    assert json.loads(frame.removeprefix("data:"))["service"]["health"] == "unloaded"
    for _ in range(3):
        now = {path: http.get(path) for path in READS}
    assert {one.status_code for one in (*before.values(), *now.values())} == {200}
    assert http.post("/api/show", json={}).json() == shown
    assert here.service.health is ServiceHealth.UNLOADED
    assert now["/health"].json() == {"status": "unloaded", "model": "tiny"}
    assert now["/v1/models"].json() == before["/v1/models"].json()
    assert now["/api/tags"].json() == before["/api/tags"].json()
    assert before["/api/ps"].json()["models"] and now["/api/ps"].json() == {"models": []}
    assert now["/api/v0/models"].json()["data"][0]["state"] == "not-loaded"
    props = now["/props"].json()
    assert "unloaded while idle" in msgspec.convert(props, PropsResponse).remarks
    assert props["is_sleeping"] and not before["/props"].json()["is_sleeping"]
    same = ("chat_template", "chat_template_caps", "bos_token", "eos_token", "model_path")
    assert {key: props[key] for key in same} == {key: before["/props"].json()[key] for key in same}
    total = "llamacpp:tokens_predicted_total"
    assert _value(now["/metrics"].text, total) == _value(counted, total) > 0


def test_requests_wait_with_heartbeats_in_their_dialect(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.001)
    monkeypatch.setattr(swap_middleware, "BEAT_S", 0.01)
    chat = {"messages": HELLO, "max_tokens": 4, "stream": True}
    wanted = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "hi", "stream": True, "max_output_tokens": 16},
        "/api/chat": {"messages": HELLO, "options": {"num_predict": 4}},
        "/v1/completions": {"prompt": "hi", "max_tokens": 4},
        "/completion": {"prompt": "hi", "n_predict": 4, "stream": True},
    }

    async def scene() -> list[httpx.Response]:
        page = {"origin": "app://obsidian.md"}
        async with httpx.AsyncClient(base_url=here.url, timeout=PATIENCE_S, headers=page) as http:
            return await asyncio.gather(
                *(http.post(path, json=body) for path, body in wanted.items())
            )

    wait_unloaded(here)
    found = dict(zip(wanted, asyncio.run(scene()), strict=True))
    assert {one.status_code for one in found.values()} == {200}
    leave = {one.headers.get("access-control-allow-origin") for one in found.values()}
    assert leave == {"app://obsidian.md"}, "a browser reads no other answer"
    assert found["/v1/chat/completions"].text.startswith(": keepalive")
    assert found["/v1/messages"].text.startswith("event: ping")
    assert found["/v1/responses"].text.startswith(": keepalive")
    assert found["/completion"].text.startswith(": keepalive")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"):
        for event in found[path].text.removesuffix("\n\n").split("\n\n"):
            assert "data: " in event, "older openai-go reads data at every blank line"
    assert found["/completion"].text.count('"stop":true') == 1
    lines = found["/api/chat"].text.removesuffix("\n").split("\n")
    assert lines[0].startswith("  ") and json.loads(lines[-1])["done"] is True
    assert found["/api/chat"].headers["content-type"].startswith("application/x-ndjson")
    assert found["/v1/completions"].json()["choices"][0]["text"]


def test_the_sdk_streams_a_response_that_waited(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its helper takes nothing before `response.created`, and reads an error in its own form."""
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.001)
    monkeypatch.setattr(swap_middleware, "BEAT_S", 0.01)
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="x", max_retries=0) as sdk:
        wait_unloaded(here)
        with sdk.responses.stream(model="tiny", input="hi", max_output_tokens=4) as events:
            kinds = [event.type for event in events]
        assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
        wait_unloaded(here)
        with pytest.raises(openai.APIError, match="stored here"):
            list(sdk.responses.create(model="tiny", input="hi", prompt={"id": "p"}, stream=True))
        body = {"input": "hi", "prompt": {"id": "p"}, "stream": True}
        wait_unloaded(here)
        text = httpx.post(f"{here.url}/v1/responses", json=body, timeout=PATIENCE_S).text
    event, data = text.rpartition(": keepalive 0/0\n")[2].split("\n", 1)
    assert event == "event: error"
    told = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "), strict=True)
    assert told.param == "prompt" and "stored here" in told.message


def test_only_a_key_wakes_it_and_a_swap_does(
    model_folder: Path, tmp_path: Path, quick: None
) -> None:
    (tmp_path / "presets").mkdir()
    text = f"model: {{id: {model_folder}, alias: other}}\nslots: {{count: 2, n_ctx: 1024}}\n"
    (tmp_path / "presets" / "other.yaml").write_text(text)
    server = structs.replace(SERVER, api_keys=(ApiKey("secret"),))
    with (
        running(tiny_preset(model_folder, server=server), tmp_path) as here,
        httpx.Client(base_url=here.url, timeout=PATIENCE_S) as http,
    ):
        wait_unloaded(here)
        refused = http.post("/v1/chat/completions", json={"messages": HELLO})
        assert refused.status_code == 401
        assert here.service.health is ServiceHealth.UNLOADED
        http.headers["authorization"] = "Bearer secret"
        changed = http.post("/v1/models/load", json={"preset": "other"})
        assert changed.status_code == 200, changed.text
        assert turn(http, "ann", user("hi"))["model"] == "other"


def test_keep_alive_moves_the_moment(here: Running) -> None:
    with ollama.Client(here.url, timeout=PATIENCE_S) as client:
        client.chat("tiny", HELLO, keep_alive=-1, options={"num_predict": 2})
        assert idle_unload.remaining_s(here.service) == math.inf
        (loaded,) = client.ps().models
        assert loaded.expires_at and loaded.expires_at.year > 2200
        client.chat("tiny", HELLO, keep_alive="1h30m", options={"num_predict": 2})
        (loaded,) = client.ps().models
        assert loaded.expires_at and 5000 < loaded.expires_at.timestamp() - time.time() < 5500
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        wait_unloaded(here)
        assert client.ps().models == []
        assert client.generate("tiny").done_reason == "load"
        with pytest.raises(ollama.ResponseError, match="keep_alive is 'soon'"):
            client.chat("tiny", HELLO, keep_alive="soon")


def test_keep_alive_of_zero_unloads_a_model_that_stays_otherwise(
    model_folder: Path, tmp_path: Path, quick: None
) -> None:
    preset = tiny_preset(model_folder, server=ServerSpec(port=0))
    with running(preset, tmp_path) as kept, ollama.Client(kept.url, timeout=PATIENCE_S) as client:
        first = client.chat("tiny", HELLO, options=TWO)
        client.chat("tiny", HELLO, keep_alive="1ms", options=TWO)
        assert idle_unload.remaining_s(kept.service) == math.inf
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        wait_unloaded(kept)
        again = client.chat("tiny", HELLO, options=TWO)
        assert again.message.content == first.message.content
        assert idle_unload.remaining_s(kept.service) == math.inf, "it leaves once"


def test_a_model_that_is_gone_fails_the_request_and_comes_back(
    model_folder: Path, here: Running, http: httpx.Client
) -> None:
    folder = model_folder
    wait_unloaded(here)
    (folder / "model.safetensors").rename(folder / "aside")
    try:
        lost = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2})
    finally:
        (folder / "aside").rename(folder / "model.safetensors")
    assert lost.status_code == 500 and "cannot be loaded again" in lost.text
    assert http.get("/health").json()["status"] == "unloaded"
    assert turn(http, "ann", user("hi"))["model"] == "tiny"


@pytest.fixture
def movable(tmp_path: Path, quick: None) -> Iterator[Running]:
    """An unloaded service whose model's files are its own, beside presets of other models."""
    (tmp_path / "presets").mkdir()
    for seed, name in enumerate(("tiny", "other", "broken")):
        folder = models.write(tmp_path / name, TINY, seed)
        text = f"model: {{id: {folder}, alias: {name}}}\nslots: {{count: 2, n_ctx: 1024}}\n"
        (tmp_path / "presets" / f"{name}.yaml").write_text(text)
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with running(tiny_preset(tmp_path / "tiny", server=SERVER), tmp_path) as found:
        wait_unloaded(found)
        yield found


def change(here: Running, preset: str) -> httpx.Response:
    return httpx.post(f"{here.url}/v1/models/load", json={"preset": preset}, timeout=PATIENCE_S)


def chat(here: Running) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 2}
    return httpx.post(f"{here.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def test_an_unloaded_model_that_is_gone_is_swapped_away(movable: Running, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "model.safetensors").unlink()
    changed = change(movable, "other")
    assert changed.status_code == 200, changed.text
    assert [step["name"] for step in changed.json()["steps"]] == ["load", "warm"]
    for _ in range(2):
        assert chat(movable).json()["model"] == "other"
        wait_unloaded(movable)


def test_an_unloaded_model_stays_when_the_next_cannot_be_loaded(movable: Running) -> None:
    refused = change(movable, "broken")
    assert refused.status_code == 500 and "tiny stays unloaded" in refused.text
    assert httpx.get(f"{movable.url}/health").json() == {"status": "unloaded", "model": "tiny"}
    assert chat(movable).json()["model"] == "tiny"


def test_a_swap_that_was_refused_does_not_happen_later(
    movable: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being prepared when a request finds that the unloaded model is gone."""
    factory = movable.service.engine_factory
    assert factory is not None
    is_begun = threading.Event()
    may_end = threading.Event()
    check = factory.check

    def slow_check(preset: Preset) -> CheckedModel:
        is_begun.set()
        assert may_end.wait(PATIENCE_S)
        return check(preset)

    monkeypatch.setattr(factory, "check", slow_check)
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.rename(tmp_path / "aside")
    with ThreadPoolExecutor(1) as pool:
        swapped = pool.submit(change, movable, "other")
        assert is_begun.wait(PATIENCE_S)
        assert chat(movable).status_code == 500
        refused = swapped.result()
    assert refused.status_code == 500 and "cannot be loaded again" in refused.text
    (tmp_path / "aside").rename(weights)
    assert chat(movable).json()["model"] == "tiny"
    may_end.set()
    wait_unloaded(movable)
    assert chat(movable).json()["model"] == "tiny"


def test_a_swap_during_a_load_is_refused(movable: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()
    may_end = threading.Event()
    warm = model_swap.warm

    async def slow_warm(service: Service) -> SwapStep:
        began.set()
        await asyncio.to_thread(may_end.wait, 60)
        return await warm(service)

    monkeypatch.setattr(model_swap, "warm", slow_warm)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(chat, movable)
        assert began.wait(PATIENCE_S)
        refused = change(movable, "other")
        may_end.set()
        assert refused.status_code == 409 and "another change" in refused.text
        assert answered.result().json()["model"] == "tiny"
    assert chat(movable).json()["model"] == "tiny"


def test_a_swap_during_an_unload_is_refused(
    movable: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()
    may_end = threading.Event()
    give_back = idle_unload.return_free_memory

    async def slow_return(gate: SwapGate) -> None:
        began.set()
        await asyncio.to_thread(may_end.wait, 60)
        await give_back(gate)

    assert chat(movable).json()["model"] == "tiny"
    monkeypatch.setattr(idle_unload, "return_free_memory", slow_return)
    assert began.wait(PATIENCE_S)
    refused = change(movable, "other")
    may_end.set()
    assert refused.status_code == 409 and "another change" in refused.text
    wait_unloaded(movable)
    assert change(movable, "other").status_code == 200


def test_an_embedding_model_is_unloaded_too(
    model_folder: Path, tmp_path: Path, quick: None
) -> None:
    preset = structs.replace(
        tiny_preset(model_folder, server=SERVER),
        kind=ServiceKind.EMBEDDING,
        slots=SlotSpec(count=1),
        # Also the request that loads the model has to wait, where no others may.
        queue=QueueSpec(max_waiting=0),
    )
    with running(preset, tmp_path) as here:
        body = {"input": "hello", "encoding_format": "float"}
        first = httpx.post(f"{here.url}/v1/embeddings", json=body, timeout=PATIENCE_S).json()
        held = here.service.stats.bytes_before_load
        wait_unloaded(here)
        assert device.active_bytes() - held < here.service.facts.n_bytes / 100
        again = httpx.post(f"{here.url}/v1/embeddings", json=body, timeout=PATIENCE_S).json()
        assert again["data"] == first["data"]
        wait_unloaded(here)


def _value(text: str, name: str) -> float:
    return next(float(x.split()[1]) for x in text.splitlines() if x.startswith(name + " "))
