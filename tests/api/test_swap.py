"""The model is changed while clients wait; agents find their KV again, or the old model stays."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from safetensors.numpy import load_file, save_file

from mlxstack.api import swap_middleware
from mlxstack.core.preset import Preset, ServerSpec, SlotSpec
from mlxstack.service.calls import model_swap
from mlxstack.service.engine_factory import CheckedModel
from mlxstack.service.service import Service
from tests import models
from tests.api.running import TINY, Running, busy_engine, running, tiny_preset
from tests.api.test_agents import RULES, answer_of, cold, history, said, turn, user
from tests.api.test_serve import process, wait_for
from tests.patience import PATIENCE_S, until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHATS = "/v1/chat/completions"
CHAT = {"messages": [user("hi")], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}
LEFT = {**STREAM, "max_tokens": 5}
"""Its client leaves while it waits."""
LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (CHATS, CHAT),
    "chat": (CHATS, STREAM),
    "messages": ("/v1/messages", STREAM),
    "responses": ("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 16}),
    "refused": (CHATS, {"messages": [], "stream": True}),
    "second": ("/v1/models/load", {"preset": "wide"}),
}
"""Requests while the model is changed."""
BEGUN_EARLY = [(path, body) for path, body in (*LATE.values(), (CHATS, LEFT)) if "stream" in body]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one geometry, one of another, and two that cannot be loaded.

    One of these fails at once, the other when its weights are in memory already.
    """
    root = tmp_path_factory.mktemp("swap")
    found = {name: root / name for name in ("a", "b", "wide", "broken", "mute")}
    models.write(found["a"], TINY, seed=1)
    models.write(found["b"], TINY, seed=2)
    models.write(found["wide"], {**TINY, "num_hidden_layers": 2, "num_key_value_heads": 4}, 3)
    shutil.copytree(found["a"], found["broken"])
    weights = load_file(found["a"] / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, found["broken"] / "model.safetensors", {"format": "mlx"})
    shutil.copytree(found["a"], found["mute"])
    (found["mute"] / "tokenizer.json").write_text("{")
    return found


@pytest.fixture
def home(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Presets that say which model, and how."""
    (tmp_path / "presets").mkdir()
    for name, folder in folders.items():
        text = f"model: {{id: {folder}, alias: model-{name}}}\nslots: {{count: 2, n_ctx: 1024}}\n"
        (tmp_path / "presets" / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def here(folders: dict[str, Path], home: Path) -> Iterator[Running]:
    """A service of model a."""
    preset = structs.replace(tiny_preset(folders["a"]), slots=SlotSpec(count=2, n_ctx=1024))
    model = structs.replace(preset.model, alias="model-a")
    with running(structs.replace(preset, model=model), home) as found:
        yield found


@pytest.fixture
def http(here: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=here.url, timeout=PATIENCE_S) as client:
        yield client


def swap(http: httpx.Client, preset: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/models/load", json={"preset": preset, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def counted(http: httpx.Client) -> float:
    """Generated tokens, as /metrics counts them."""
    lines = http.get("/metrics").text.splitlines()
    return next(
        float(x.split()[1]) for x in lines if x.startswith("llamacpp:tokens_predicted_total")
    )


def test_a_swap_that_cannot_be_written_down_is_done(
    folders: dict[str, Path], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "file").write_text("no folder")
    preset = structs.replace(tiny_preset(folders["a"]), slots=SlotSpec(count=2, n_ctx=1024))
    with (
        running(preset, home, home / "file" / "preset.json") as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        swap(http, "wide")
        assert http.get("/v1/models").json()["data"][0]["id"] == "model-wide"
        turn(http, "ann", RULES, user("hello"))
    assert "after a restart the old model will be served" in caplog.text


def test_g4_g9_the_timeline_of_a_swap(http: httpx.Client, here: Running) -> None:
    turn(http, "ann", RULES, user("hello"))
    before = counted(http)
    told = swap(http, "wide")
    assert counted(http) == before > 0, "counters never go back"
    assert [step["name"] for step in told["steps"]] == ["drain", "park", "unload", "load", "warm"]
    assert (told["before"], told["model"]) == ("model-a", "model-wide")
    park, unload, load = told["steps"][1:4]
    assert park["count"] >= 1 and load["n_bytes"] == here.service.facts.n_bytes
    assert unload["n_bytes"] > 0
    assert http.get("/v1/models").json()["data"][0]["id"] == "model-wide"
    assert http.get("/props").json()["model_alias"] == "model-wide"
    assert http.get("/health").json() == {"status": "ok"}
    assert turn(http, "ann", user("again"))["model"] == "model-wide"


def test_g9_models_that_are_left_or_fail_free_their_memory(
    folders: dict[str, Path], home: Path
) -> None:
    """Measured in a process of its own, which holds no arrays of other tests."""
    preset = tiny_preset(folders["a"], server=ServerSpec(port=unused_port()))
    url = f"http://127.0.0.1:{preset.server.port}"
    shutil.copytree(home / "presets", home / "home" / "presets")
    with process(preset, home), httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        wait_for(url)
        turn(http, "ann", RULES, user("hello"))
        first = swap(http, "wide")
        for wanted in ("broken", "mute"):
            assert http.post("/v1/models/load", json={"preset": wanted}).status_code == 500
        second = swap(http, "b")
    held = first["active_bytes"]["before_load"]
    weights = first["steps"][3]["n_bytes"]
    for seen in (first["active_bytes"]["after_unload"], second["active_bytes"]["before_load"]):
        assert seen <= held * 1.05 + 0.05 * weights


def test_g5_g6_g7_d16_there_and_back_again(http: httpx.Client) -> None:
    first = turn(http, "ann", RULES, user("my word is pear"))
    turn(http, "ann", user("and plum"))
    swap(http, "b")
    met = turn(http, "ann", user("which words"))
    assert met["agent"]["cached_tokens"] == 0, "two models of one geometry never share"
    missed = http.get("/v1/agents/ann").json()["miss"]
    assert missed["reason"] == "model changed", "D16"
    assert turn(http, "ann", user("once more"))["agent"]["cached_tokens"] > 100
    kept = history(http, "ann")
    swap(http, "a")
    back = turn(http, "ann", user("and now"))
    assert back["agent"]["cached_tokens"] >= first["usage"]["prompt_tokens"] // 128 * 128 > 0
    assert answer_of(said(back)) == answer_of(cold(http, [*kept, user("and now")]))
    places = {s["model"]: s["place"] for s in http.get("/v1/agents/ann").json()["states"]}
    assert set(places) == {"model-a", "model-b"} and places["model-b"] == "disk"


@pytest.mark.parametrize("wanted", ["broken", "mute"])
def test_g8_g9_a_failed_load_goes_back(http: httpx.Client, here: Running, wanted: str) -> None:
    before = turn(http, "ann", RULES, user("hello"))
    broken = http.post("/v1/models/load", json={"preset": wanted})
    assert broken.status_code == 500 and "model-a answers again" in broken.text
    after = turn(http, "ann", user("still there"))
    assert after["model"] == before["model"] == "model-a"
    assert after["agent"]["cached_tokens"] > 100
    for body in (
        {"preset": "nothing"},
        {"model": "/no/such/folder"},
        {},
        {"preset": "a", "model": "b"},
    ):
        answer = http.post("/v1/models/load", json=body)
        assert answer.status_code == 400, answer.text
    assert turn(http, "ann", user("and still"))["agent"]["cached_tokens"] > 100


def test_prepare_changes_nothing(http: httpx.Client, folders: dict[str, Path]) -> None:
    told = swap(http, "b", prepare=True)
    assert told["path"] == str(folders["b"]) and told["n_bytes"] > 100_000
    assert http.get("/props").json()["model_alias"] == "model-a"
    (folders["b"] / "model.safetensors").rename(folders["b"] / "aside")
    try:
        missing = http.post("/v1/models/load", json={"preset": "b", "prepare": True})
    finally:
        (folders["b"] / "aside").rename(folders["b"] / "model.safetensors")
    assert missing.status_code == 400 and "complete weights" in missing.text


def test_what_does_not_fit_is_refused_while_the_old_model_answers(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", "64MB")
    answer = http.post("/v1/models/load", json={"preset": "wide"})
    assert answer.status_code == 400
    for word in ("`wide` does not fit", "2 x 1024 tokens", "workspace"):
        assert word in answer.text
    assert turn(http, "ann", user("hello"))["model"] == "model-a"


def test_d9_a_swap_warms_again(http: httpx.Client, home: Path, folders: dict[str, Path]) -> None:
    (home / "head.txt").write_text("the same rules for all of you, every day. " * 20)
    text = (home / "presets" / "b.yaml").read_text()
    warm = f"warm_prefixes: [{{name: rules, text_file: {home / 'head.txt'}}}]"
    (home / "presets" / "b.yaml").write_text(
        f"{text}prefix_cache: {{warm_on_startup: true, {warm}}}\n"
    )
    told = swap(http, "b")
    assert told["steps"][-1]["count"] == 1
    names = {prefix["name"] for prefix in http.get("/cache").json()["prefixes"]}
    assert "rules" in names


def test_g4_whoever_is_served_finishes_and_whoever_comes_waits(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.01)
    monkeypatch.setattr(swap_middleware, "BEAT_S", 0.02)
    check = model_swap.prepare
    is_checked = threading.Event()

    async def checked(service: Service, preset: Preset) -> CheckedModel:
        """The check, which ends while the early request is served."""
        found = await check(service, preset)
        is_checked.set()
        await until(lambda: service.gate.n_inside == 2)
        return found

    monkeypatch.setattr(model_swap, "prepare", checked)

    begun: list[tuple[str, Any]] = []

    async def note_head(response: httpx.Response) -> None:
        begun.append((response.request.url.path, json.loads(response.request.content)))

    async def scene() -> dict[str, Any]:
        hooks = {"response": [note_head]}
        async with httpx.AsyncClient(
            base_url=here.url, timeout=PATIENCE_S, event_hooks=hooks
        ) as http:
            slowly = {"preset": "b", "drain_s": PATIENCE_S}
            changing = asyncio.create_task(http.post("/v1/models/load", json=slowly))
            await until(is_checked.is_set)
            # The early request stands still until those that come later wait.
            with busy_engine(here):
                early = asyncio.create_task(http.post(CHATS, json={**STREAM, "seed": 1}))
                await until(lambda: here.service.gate.is_closed)
                late = {
                    name: asyncio.create_task(http.post(path, json=body))
                    for name, (path, body) in LATE.items()
                }
                gone = asyncio.create_task(http.post(CHATS, json=LEFT))
                await until(lambda: all(head in begun for head in BEGUN_EARLY))
                assert not early.done()
                gone.cancel()
            answers = await asyncio.gather(early, changing, *late.values())
            return dict(zip(("early", "changing", *late), answers, strict=True))

    found = asyncio.run(scene())
    # Who has left is not waited for; that it left is seen a moment later.
    asyncio.run(until(lambda: here.service.gate.n_inside == 0))
    second = found.pop("second")
    assert second.status_code == 409 and "under way" in second.text
    assert {answer.status_code for answer in found.values()} == {200}
    assert '"model":"model-a"' in found["early"].text and "[DONE]" in found["early"].text
    assert found["changing"].json()["steps"][0]["count"] == 1
    check_late(found)


def check_late(found: dict[str, Any]) -> None:
    """Those that waited are answered by the new model, streams from their heartbeats on."""
    assert found["whole"].json()["model"] == "model-b"
    assert found["chat"].text.startswith(": keepalive") and "[DONE]" in found["chat"].text
    assert found["messages"].text.startswith("event: ping")
    assert "message_stop" in found["messages"].text
    assert found["responses"].text.startswith(": keepalive")
    last = found["responses"].text.rsplit("event: ", 1)[1].split()[0]
    assert last in ("response.completed", "response.incomplete"), found["responses"].text[-1500:]
    assert (
        "messages" in json.loads(found["refused"].text.rsplit("data: ", 1)[1])["error"]["message"]
    )


def test_a_drain_has_a_deadline(here: Running) -> None:
    async def scene() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=here.url, timeout=PATIENCE_S) as http:
            long = {"messages": [user("hi")], "max_tokens": 900, "ignore_eos": True}
            early = asyncio.create_task(http.post("/v1/chat/completions", json=long))
            await until(lambda: any(s.n_decoded for s in here.service.engine.snapshot().slots))
            body = {"preset": "b", "drain_s": 0.01}
            changed = await http.post("/v1/models/load", json=body)
            return await early, changed

    early, changed = asyncio.run(scene())
    assert early.status_code == 503 and "retry-after" in early.headers
    assert changed.status_code == 200 and changed.json()["model"] == "model-b"
