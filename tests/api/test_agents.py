"""Agents by name: their history is kept here, their turns follow one another, they can branch."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxstack.core.preset import AgentsSpec, Persist, SlotSpec
from mlxstack.store.agent_history import History
from tests import models, patience
from tests.api.running import Running, running, tiny_preset, unanswered
from tests.engine.harness import is_busy
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

RULES = {"role": "system", "content": "You are a clerk who keeps a long list of small things. " * 6}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def turn(http: httpx.Client, agent: str, *messages: Any, **more: Any) -> dict[str, Any]:
    """One turn by what is new."""
    body = {"append": list(messages), "max_tokens": 6, "temperature": 0, **more}
    answer = http.post(f"/v1/agents/{agent}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def history(http: httpx.Client, agent: str) -> list[dict[str, Any]]:
    return list(http.get(f"/v1/agents/{agent}/history").raise_for_status().json()["messages"])


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["choices"][0]["message"])


def cold(http: httpx.Client, messages: list[Any]) -> dict[str, Any]:
    """The same conversation computed from nothing, by nobody."""
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "cache_prompt": False}
    return said(http.post("/v1/chat/completions", json=body).raise_for_status().json())


def answer_of(message: dict[str, Any]) -> tuple[str, str]:
    return message.get("content") or "", message.get("reasoning_content") or ""


@pytest.fixture
def bob(http: httpx.Client) -> Iterator[str]:
    """An agent with two turns behind it."""
    turn(http, "bob", RULES, user("remember the word apple"))
    turn(http, "bob", user("and the word pear"))
    yield "bob"
    for agent in http.get("/v1/agents").json()["data"]:
        http.delete(f"/v1/agents/{agent['id']}")


def test_b10_the_server_keeps_the_history(http: httpx.Client, bob: str) -> None:
    kept = history(http, bob)
    assert [m["role"] for m in kept] == ["system", "user", "assistant", "user", "assistant"]
    answer = turn(http, bob, user("what were they"))
    assert answer["agent"]["id"] == bob and answer["agent"]["cached_tokens"] > 100
    assert answer_of(history(http, bob)[-1]) == answer_of(said(answer))
    shown = http.get(f"/v1/agents/{bob}").json()
    assert (shown["n_requests"], shown["is_explicit"], shown["place"]) == (3, True, "live")
    assert shown["cached_share"] > 0.3 and shown["bytes"]["live"] > 0
    assert 0 <= answer["agent"]["n_tokens"] - shown["n_tokens"] <= 1, "the last token is not fed"
    assert http.get("/v1/agents").json()["data"][0]["id"] == bob
    assert answer_of(said(answer)) == answer_of(cold(http, [*kept, user("what were they")]))


def test_b3_chat_with_a_session_id_is_the_same_agent(
    http: httpx.Client, sdk: openai.OpenAI
) -> None:
    first: list[Any] = [RULES, user("my name is Ada")]
    raw = sdk.chat.completions.create(
        model="tiny", messages=first, max_tokens=6, extra_body={"session_id": "s-1"}
    )
    kept = history(http, "s-1")
    assert [m["content"] for m in kept[:2]] == [m["content"] for m in first]
    assert kept[2]["content"] == (raw.choices[0].message.content or "")
    assert turn(http, "s-1", user("and who am I"))["agent"]["cached_tokens"] > 100
    other = turn(http, "s-2", RULES, user("who am I"))
    assert "Ada" not in json.dumps([history(http, "s-2"), other])


def test_a_stream_is_kept_too(http: httpx.Client, bob: str) -> None:
    body = {"append": [user("go on")], "max_tokens": 6, "stream": True}
    with http.stream("POST", f"/v1/agents/{bob}/generate", json=body) as answer:
        assert answer.headers["x-mlx-stack-agent"] == bob
        assert int(answer.headers["x-mlx-stack-cache-prefix-tokens"]) > 100
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert history(http, bob)[-1]["content"] == text


def test_fork_goes_on_from_the_same_state(http: httpx.Client, bob: str) -> None:
    before = history(http, bob)
    made = http.post(f"/v1/agents/{bob}/fork", json={"id": "bob.2"})
    assert made.status_code == 200 and made.json()["id"] == "bob.2"
    answer = turn(http, "bob.2", user("a third word"))
    assert answer["agent"]["cached_tokens"] > 100
    assert answer_of(said(answer)) == answer_of(cold(http, [*before, user("a third word")]))
    assert history(http, bob) == before
    again = http.post(f"/v1/agents/{bob}/fork", json={"id": "bob.2"})
    assert again.status_code == 409 and "bob.2" in again.text


def test_rewind_goes_back_to_a_message(http: httpx.Client, bob: str) -> None:
    before = history(http, bob)
    http.post(f"/v1/agents/{bob}/rewind", json={"n_messages": 3}).raise_for_status()
    assert history(http, bob) == before[:3]
    answer = turn(http, bob, user("and the word plum"))
    assert answer["agent"]["cached_tokens"] > 100
    assert answer_of(said(answer)) == answer_of(
        cold(http, [*before[:3], user("and the word plum")])
    )
    refused = http.post(f"/v1/agents/{bob}/rewind", json={"n_messages": 99})
    assert refused.status_code == 400 and "99" in refused.text and "5" in refused.text


def test_evict_only_keeps_the_agent_and_delete_forgets_it(http: httpx.Client, bob: str) -> None:
    gone = http.delete(f"/v1/agents/{bob}?evict_only=1").json()
    assert gone["n_evicted"] > 100 and not gone["deleted"]
    assert http.get(f"/v1/agents/{bob}").json()["bytes"]["live"] == 0
    assert turn(http, bob, user("still there"))["agent"]["cached_tokens"] > 100
    assert http.delete(f"/v1/agents/{bob}").json()["deleted"]
    for path in (f"/v1/agents/{bob}", f"/v1/agents/{bob}/history"):
        assert http.get(path).status_code == 404
    assert http.delete(f"/v1/agents/{bob}").status_code == 404


def test_priority_and_pin(http: httpx.Client, bob: str, live: Running) -> None:
    wanted = {"priority": "high", "is_pinned": True}
    shown = http.post(f"/v1/agents/{bob}", json=wanted).json()
    assert (shown["priority"], shown["is_pinned"]) == ("high", True)
    turn(http, bob, user("more"))
    names = {p["name"] for p in http.get("/cache?limit=100").json()["prefixes"]}
    assert f"agent:{bob}" in names
    assert live.service.request_log.last_in_slot[shown["slot"]].priority == 0
    assert http.post(f"/v1/agents/{bob}", json={"is_pinned": False}).json()["is_pinned"] is False
    names = {p["name"] for p in http.get("/cache?limit=100").json()["prefixes"]}
    assert f"agent:{bob}" not in names
    assert http.post(f"/v1/agents/{bob}", json={"priority": "urgent"}).status_code == 400


def test_e12_turns_of_one_agent_follow_one_another(live: Running, http: httpx.Client) -> None:
    turn(http, "eve", RULES, user("start"))

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as client:
            body = {"max_tokens": 40, "ignore_eos": True}
            first = asyncio.create_task(
                client.post("/v1/agents/eve/generate", json={**body, "append": [user("one")]})
            )
            await patience.until(lambda: live.service.agent_locks.is_busy("eve"))
            refused = await client.post(
                "/v1/agents/eve/generate", json={**body, "append": [user("no")]}
            )
            queued = [
                client.post(
                    "/v1/agents/eve/generate",
                    json={**body, "append": [user(text)], "queue": True, "stream": text == "two"},
                )
                for text in ("two", "three")
            ]
            return [refused, *await asyncio.gather(first, *queued)]

    refused, *answers = asyncio.run(both())
    assert refused.status_code == 409 and "queue" in refused.text
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    kept = history(http, "eve")
    told = [message["content"] for message in kept if message["role"] == "user"]
    assert told == ["start", "one", "two", "three"]
    assert [message["role"] for message in kept[1:]] == ["user", "assistant"] * 4


def test_an_agent_is_busy_until_its_history_is_written(
    live: Running, http: httpx.Client, bob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client left while the disk was slow: nobody may change the history before that write."""
    write = live.service.agent_store.write
    writing = threading.Event()
    may_write = threading.Event()

    def slow(agent: str, history: History) -> None:
        writing.set()
        may_write.wait(PATIENCE_S)
        write(agent, history)

    def rewound() -> int:
        return http.post(f"/v1/agents/{bob}/rewind", json={"n_messages": 1}).status_code

    monkeypatch.setattr(live.service.agent_store, "write", slow)
    body = {"append": [user("and the word plum")], "max_tokens": 2}
    with unanswered(f"{live.url}/v1/agents/{bob}/generate", body):
        assert writing.wait(PATIENCE_S)
    for _ in range(10):
        assert rewound() == 409
    may_write.set()
    wait_until(lambda: rewound() != 409)
    assert [message["role"] for message in history(http, bob)] == ["system"]


def test_e13_agents_run_side_by_side(live: Running) -> None:
    spans: dict[str, list[float]] = {}

    async def one(client: httpx.AsyncClient, agent: str) -> None:
        body = {
            "append": [user(f"I am {agent}")],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        clock = asyncio.get_running_loop().time
        async with client.stream("POST", f"/v1/agents/{agent}/generate", json=body) as answer:
            spans[agent] = [clock() async for line in answer.aiter_lines() if "content" in line]

    async def both() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as client:
            await asyncio.gather(one(client, "left"), one(client, "right"))

    asyncio.run(both())
    left = spans["left"][1:]
    right = spans["right"][1:]
    assert max(left[0], right[0]) < min(left[-1], right[-1])


@pytest.mark.parametrize("agent", ["a b", "ä", "x" * 129, "a,b"])
def test_impossible_ids_are_refused(http: httpx.Client, agent: str) -> None:
    answer = http.post(f"/v1/agents/{agent}/generate", json={"append": [user("hi")]})
    assert answer.status_code == 400 and "1 to 128" in answer.text
    assert http.post("/v1/agents", json={"id": agent}).status_code == 400


@pytest.mark.parametrize("agent", [".", ".."])
def test_ids_that_clients_take_out_of_a_path_are_refused(http: httpx.Client, agent: str) -> None:
    answer = http.post("/v1/agents", json={"id": agent})
    assert answer.status_code == 400 and "not . or .." in answer.text
    said = {"messages": [user("hi")], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json={**said, "agent": agent}).status_code == 400
    assert http.post("/v1/agents", json={"id": agent + ".."}).status_code == 200


def test_create_with_a_past_and_what_is_refused(http: httpx.Client) -> None:
    past = [RULES, user("hello"), {"role": "assistant", "content": "hi"}]
    made = http.post("/v1/agents", json={"id": "carl", "messages": past})
    assert made.status_code == 200 and made.json()["id"] == "carl"
    assert [m["content"] for m in history(http, "carl")] == [m["content"] for m in past]
    assert http.post("/v1/agents", json={"id": "carl"}).status_code == 409
    assert http.post("/v1/agents", json={}).json()["id"].startswith("agent-")
    assert http.get("/v1/agents/nobody").status_code == 404
    assert http.get("/v1/agents/nobody/history").status_code == 404
    both = {"messages": past, "append": past}
    assert http.post("/v1/agents/carl/generate", json=both).status_code == 400
    assert http.post("/v1/agents/carl/generate", json={}).status_code == 400
    assert len(history(http, "carl")) == 3


def test_a_history_that_does_not_fit_is_refused_with_both_numbers(http: httpx.Client) -> None:
    http.post("/v1/agents", json={"id": "long", "messages": [user("many words " * 600)]})
    answer = http.post("/v1/agents/long/generate", json={"append": [user("more")]})
    assert answer.status_code == 400 and "1024" in answer.text
    found = re.findall(r"\d+", answer.json()["error"]["message"])
    assert any(int(number) > 1024 for number in found)
    assert len(history(http, "long")) == 1


def test_g1_g2_g12_files_of_an_agent(model_folder: Path, tmp_path: Path) -> None:
    preset = tiny_preset(model_folder)
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        turn(http, "Ann:1", RULES, user("hello"))
        key = found.service.facts.identity.key()
        path = tmp_path / "agents" / "ann=1~1" / key / "manifest.json"
        wait_until(path.exists)
        manifest = json.loads(path.read_text())["manifest"]
    kept = json.loads((tmp_path / "agents" / "ann=1~1" / "history.json").read_text())
    assert [m["role"] for m in kept["messages"]] == ["system", "user", "assistant"]
    assert (kept["agent"], kept["facts"]["sums"]["n_requests"]) == ("Ann:1", 1)
    assert manifest["identity"] == key and manifest["model"] == "tiny"
    stored = {p.name.removesuffix(".safetensors") for p in (tmp_path / "kv" / key).rglob("*.*")}
    assert manifest["segments"] and set(manifest["segments"]) <= stored
    for file in (tmp_path / "agents").rglob("*"):
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600)


def test_g3_agents_come_back_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    preset = tiny_preset(model_folder)
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        first = turn(http, "zoe", RULES, user("hello"))
        http.post("/v1/agents/zoe", json={"priority": "low"}).raise_for_status()
        before = history(http, "zoe")
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        shown = http.get("/v1/agents/zoe").json()
        assert shown["bytes"] == {"live": 0, "parked": 0, "disk": shown["n_bytes"]}
        assert shown["n_bytes"] > 0
    manifest = next((tmp_path / "agents" / "zoe").glob("*/manifest.json"))
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        shown = http.get("/v1/agents/zoe").json()
        assert (shown["place"], shown["priority"], shown["n_requests"]) == ("disk", "low", 1)
        assert shown["states"][0]["n_tokens"] >= first["usage"]["prompt_tokens"]
        answer = turn(http, "zoe", user("again"))
        n_prompt = first["usage"]["prompt_tokens"]
        assert answer["agent"]["cached_tokens"] >= n_prompt - n_prompt % 128 > 0
        assert answer_of(said(answer)) == answer_of(cold(http, [*before, user("again")]))
        last = history(http, "zoe")
    manifest.write_text("{broken")
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        assert history(http, "zoe") == last
        answer = turn(http, "zoe", user("and again"))
        assert answer_of(said(answer)) == answer_of(cold(http, [*last, user("and again")]))


def kv_files(found: Running, home: Path) -> list[Path]:
    """All KV on disk, once nothing waits to be written."""
    engine: Any = found.service.engine
    wait_until(lambda: not is_busy(engine), "the engine does not come to rest")
    engine.run(lambda _: engine.loaded.disk_tier.catch_up()).result(timeout=PATIENCE_S)
    return list((home / "kv").rglob("*.safetensors"))


@pytest.mark.parametrize("persist", list(Persist))
def test_persist_modes(model_folder: Path, tmp_path: Path, persist: Persist) -> None:
    preset = tiny_preset(
        model_folder, agents=AgentsSpec(persist=persist), slots=SlotSpec(count=1, n_ctx=1024)
    )
    folder = tmp_path / "agents" / "ida"
    is_kept = persist is not Persist.NEVER
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        turn(http, "ida", RULES, user("hello"))
        is_written = bool(kv_files(found, tmp_path))
        assert is_written is (persist is Persist.AFTER_TURN)
        assert bool(list(folder.glob("*/manifest.json"))) is is_written
        turn(http, "leo", user("something else entirely " * 40))
        assert bool(kv_files(found, tmp_path)) is is_kept
        again = turn(http, "ida", user("more"))
        assert again["agent"]["cached_tokens"] > 100
        assert len(history(http, "ida")) == 5
    assert bool(list((tmp_path / "kv").rglob("*.safetensors"))) is is_kept
    assert folder.exists() is is_kept
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        assert http.get("/v1/agents/ida").status_code == (200 if is_kept else 404)
        if is_kept:
            assert turn(http, "ida", user("back"))["agent"]["cached_tokens"] > 100


@pytest.mark.parametrize("config", [models.SLIDING, models.HYBRID], ids=["tiny-swa", "tiny-hybrid"])
def test_g3_g5_layers_that_cannot_be_cut_branch_and_come_back(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = models.write(tmp_path / "model", config)
    preset = tiny_preset(folder)
    home = tmp_path / "home"
    with (
        running(preset, home) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        turn(http, "kim", RULES, user("hello"))
        turn(http, "kim", user("go on"))
        turn(http, "kim", user("and on"))
        kept = history(http, "kim")
        http.post("/v1/agents/kim/fork", json={"id": "kim.2"}).raise_for_status()
        forked = turn(http, "kim.2", user("a branch"))
        http.post("/v1/agents/kim/rewind", json={"n_messages": 3}).raise_for_status()
        rewound = turn(http, "kim", user("another way"))
        assert min(a["agent"]["cached_tokens"] for a in (forked, rewound)) > 100
        assert answer_of(said(forked)) == answer_of(cold(http, [*kept, user("a branch")]))
        assert answer_of(said(rewound)) == answer_of(cold(http, [*kept[:3], user("another way")]))
        last = history(http, "kim.2")
    with (
        running(preset, home) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        back = turn(http, "kim.2", user("back again"))
        assert back["agent"]["cached_tokens"] > 100
        assert answer_of(said(back)) == answer_of(cold(http, [*last, user("back again")]))


def test_c13_restore_chat_save_by_hand_and_by_itself(http: httpx.Client) -> None:
    def lap(text: str) -> dict[str, Any]:
        http.post("/slots/1?action=restore", json={"filename": "hand.bin"})
        body = {
            "messages": [*said_so_far, user(text)],
            "id_slot": 1,
            "max_tokens": 6,
            "temperature": 0,
        }
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        said_so_far.extend([user(text), {"role": "assistant", **answer["choices"][0]["message"]}])
        http.post("/slots/1?action=save", json={"filename": "hand.bin"}).raise_for_status()
        http.post("/slots/1?action=erase").raise_for_status()
        return dict(answer)

    said_so_far: list[Any] = [RULES]
    by_hand = [lap(text) for text in ("one", "two", "three")]
    by_itself = [turn(http, "auto", RULES, user("one"))]
    by_itself += [turn(http, "auto", user(text)) for text in ("two", "three")]
    assert [answer_of(said(a)) for a in by_hand] == [answer_of(said(a)) for a in by_itself]
    for answers in (by_hand, by_itself):
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers[1:]]
        assert min(cached) > 100


def test_a_damaged_history_is_told_and_healed_by_full_messages(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "agents" / "eli"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "history.json").write_text('{"version": 1, "agent": "eli", "mess')
    preset = tiny_preset(model_folder)
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        refused = http.post("/v1/agents/eli/generate", json={"append": [user("hi")]})
        assert refused.status_code == 409 and "full `messages`" in refused.text
        forked = http.post("/v1/agents/eli/fork", json={"id": "eve"})
        assert forked.status_code == 409 and "full `messages`" in forked.text
        body = {"messages": [RULES, user("hi")], "max_tokens": 4}
        http.post("/v1/agents/eli/generate", json=body).raise_for_status()
        assert len(history(http, "eli")) == 3


def test_g3_a_short_conversation_comes_back_too(model_folder: Path, tmp_path: Path) -> None:
    preset = tiny_preset(model_folder)
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        first = turn(http, "flo", user("hi"), max_tokens=1)
        assert first["usage"]["prompt_tokens"] < 128
        assert http.get("/v1/agents/flo").json()["bytes"]["live"] > 0
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        same = {"messages": [user("hi")], "max_tokens": 6, "session_id": "flo", "temperature": 0}
        again = http.post("/v1/chat/completions", json=same).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer_of(said(again)) == answer_of(cold(http, [user("hi")]))


def test_x_9_a_client_that_leaves_leaves_no_trace(
    http: httpx.Client, live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxstack.api.dialects.native.agents.LOOKUP_S", 0.05)
    turn(http, "gus", RULES, user("hello"))
    cancelled = live.service.engine.snapshot().counters.n_cancelled
    body = {"append": [user("long")], "max_tokens": 800, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/agents/gus/generate", json=body) as answer:
        # An iterator that is let go closes its response.
        lines = answer.iter_lines()
        next(lines)
        # Held here, or the lines would forget a lock that is never released.
        lock = live.service.agent_locks._locks["gus"]
        queued = {"append": [user("next")], "max_tokens": 4, "queue": True, "stream": True}
        with http.stream("POST", "/v1/agents/gus/generate", json=queued) as waiting:
            heartbeats = waiting.iter_lines()
            assert next(heartbeats).startswith("data: ")
            assert live.service.agent_locks.is_busy("gus") and lock.locked()
    wait_until(
        lambda: (
            not (
                live.service.agent_locks.is_busy("gus")
                or lock.locked()
                or live.service.engine.snapshot().counters.n_cancelled == cancelled
            )
        ),
        "the turn, its lock or its request in the engine goes on",
    )
    assert len(history(http, "gus")) == 3
    assert turn(http, "gus", user("again"))["agent"]["cached_tokens"] > 100


def test_a_forgotten_agent_does_not_come_back_by_a_late_write(
    model_folder: Path, tmp_path: Path
) -> None:
    with (
        running(tiny_preset(model_folder), tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        for n in range(8):
            turn(http, f"gone-{n}", RULES, user("hello"), max_tokens=1)
            http.delete(f"/v1/agents/gone-{n}").raise_for_status()
    assert not list((tmp_path / "agents").iterdir())
