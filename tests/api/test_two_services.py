"""Two services of one home and one agent: no acknowledged turn is lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from mlxstack.core.request import Priority
from mlxstack.store.agent_history import AgentFolders
from tests.api.running import running, tiny_preset
from tests.api.test_serve import process, wait_for
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

LONG = {"max_tokens": 700, "ignore_eos": True}
Pair = tuple[httpx.Client, httpx.Client]


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two processes that share a home."""
    home = tmp_path_factory.mktemp("shared")
    with ExitStack() as stack:
        clients = []
        for _ in range(2):
            port = unused_port()
            preset = tiny_preset(model_folder, server=ServerSpec(port=port, drain_s=1))
            stack.enter_context(process(preset, home))
            url = f"http://127.0.0.1:{port}"
            wait_for(url)
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S)))
        yield clients[0], clients[1]


def turn(http: httpx.Client, agent: str, text: str, **more: Any) -> httpx.Response:
    body = {"append": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return http.post(f"/v1/agents/{agent}/generate", json=body)


def said(http: httpx.Client, agent: str) -> list[str]:
    """What the user said, as the history has it."""
    found = http.get(f"/v1/agents/{agent}/history").raise_for_status().json()["messages"]
    return [message["content"] for message in found if message["role"] == "user"]


def begun(http: httpx.Client, path: str, body: dict[str, Any]) -> threading.Thread:
    """A long stream whose first token has come; it goes on in its thread."""
    has_begun = threading.Event()

    def read() -> None:
        with http.stream("POST", path, json={**body, **LONG, "stream": True}) as answer:
            for line in answer.iter_lines():
                if '"content":"' in line or '"reasoning_content":"' in line:
                    has_begun.set()
        has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    return thread


def long_turn(http: httpx.Client, agent: str, text: str) -> threading.Thread:
    return begun(
        http, f"/v1/agents/{agent}/generate", {"append": [{"role": "user", "content": text}]}
    )


def test_a_turn_in_one_service_refuses_those_of_the_other(pair: Pair) -> None:
    one, other = pair
    assert turn(one, "bob", "first").status_code == 200
    going = long_turn(one, "bob", "from one")
    refused = turn(other, "bob", "from the other")
    assert going.is_alive(), "the turn was too short for this test"
    going.join()
    assert refused.status_code == 409 and "another service" in refused.text
    assert turn(other, "bob", "again").status_code == 200
    assert said(one, "bob") == said(other, "bob") == ["first", "from one", "again"]


def test_a_patient_turn_waits_for_the_other_service(pair: Pair) -> None:
    one, other = pair
    going = long_turn(one, "eve", "from one")
    waited = turn(other, "eve", "from the other", queue=True)
    assert not going.is_alive()
    assert waited.status_code == 200
    assert said(one, "eve") == ["from one", "from the other"]


def test_every_acknowledged_turn_of_a_crowd_is_kept(pair: Pair) -> None:
    def ask(at: int) -> str | None:
        text = f"turn {at}"
        answer = turn(pair[at % 2], "ida", text, queue=at % 3 > 0)
        assert answer.status_code in (200, 409), answer.text
        return text if answer.status_code == 200 else None

    with ThreadPoolExecutor(8) as pool:
        kept = [text for text in pool.map(ask, range(16)) if text is not None]
    assert sorted(said(pair[0], "ida")) == sorted(kept)
    assert len(kept) >= 10


def test_a_turn_in_one_service_refuses_edits_in_the_other(pair: Pair) -> None:
    one, other = pair
    assert turn(other, "zoe", "first").status_code == 200
    going = long_turn(one, "zoe", "from one")
    refused = {
        "rewind": other.post("/v1/agents/zoe/rewind", json={"n_messages": 0}),
        "delete": other.delete("/v1/agents/zoe"),
        "create": other.post("/v1/agents", json={"id": "zoe"}),
        "fork": other.post("/v1/agents/zoe/fork", json={"id": "zoe"}),
    }
    changed = other.post("/v1/agents/zoe", json={"priority": "low"})
    assert going.is_alive(), "the turn was too short for this test"
    going.join()
    for name, answer in refused.items():
        assert answer.status_code == 409 and "another service" in answer.text, name
    assert changed.status_code == 200
    assert said(one, "zoe") == said(other, "zoe") == ["first", "from one"]
    assert other.delete("/v1/agents/zoe").status_code == 200
    assert one.get("/v1/agents/zoe/history").status_code == 404


def test_a_turn_waits_for_a_request_of_the_other_service(pair: Pair) -> None:
    """The request replaces the history by its own conversation when it ends."""
    one, other = pair
    body = {"messages": [{"role": "user", "content": "from one"}], "agent": "kim"}
    going = begun(one, "/v1/chat/completions", body)
    assert turn(other, "kim", "too early").status_code == 409
    assert going.is_alive(), "the request was too short for this test"
    added = turn(other, "kim", "from the other", queue=True)
    going.join()
    assert added.status_code == 200
    assert said(one, "kim") == ["from one", "from the other"]


def test_a_turn_in_one_service_keeps_what_the_other_set(model_folder: Path, tmp_path: Path) -> None:
    preset, stored = tiny_preset(model_folder), AgentFolders(tmp_path / "agents")
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(httpx.Client(base_url=each.url, timeout=PATIENCE_S))
            for each in [stack.enter_context(running(preset, tmp_path)) for _ in range(2)]
        )
        for http in (one, other):
            assert turn(http, "kit", "hello").status_code == 200
        one.post("/v1/agents/kit", json={"priority": "high"}).raise_for_status()
        other.post("/v1/agents/kit", json={"is_pinned": True}).raise_for_status()
        for http in (other, one):
            assert turn(http, "kit", "and again").status_code == 200
        one.post("/v1/agents/kit/fork", json={"id": "kim"}).raise_for_status()
    facts = stored.read("kit").facts
    assert (facts["priority"], facts["is_pinned"]) == (Priority.HIGH, True)
    assert stored.read("kim").facts["is_pinned"] is False
