"""Two services of one home and one agent: no acknowledged turn is lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from mlxstack.core.preset import Preset
from mlxstack.core.request import Priority
from mlxstack.store.agent_history import AgentFolders
from tests.api.running import Running, running, single_steps, tiny_preset
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


class Peer(Struct, frozen=True):
    """One of the services, and a client of it."""

    live: Running
    http: httpx.Client


Pair = tuple[Peer, Peer]


@contextmanager
def sharing(preset: Preset, home: Path) -> Iterator[Pair]:
    """Two services that share a home; their locks exclude each other as those of two processes."""
    with ExitStack() as stack:
        one, other = (
            Peer(
                live := stack.enter_context(running(preset, home)),
                stack.enter_context(httpx.Client(base_url=live.url, timeout=PATIENCE_S)),
            )
            for _ in range(2)
        )
        yield one, other


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with sharing(tiny_preset(model_folder), tmp_path_factory.mktemp("shared")) as found:
        yield found


def turn(peer: Peer, agent: str, text: str, **more: Any) -> httpx.Response:
    body = {"append": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return peer.http.post(f"/v1/agents/{agent}/generate", json=body)


def said(peer: Peer, agent: str) -> list[str]:
    """What the user said, as the history has it."""
    found = peer.http.get(f"/v1/agents/{agent}/history").raise_for_status().json()["messages"]
    return [message["content"] for message in found if message["role"] == "user"]


@contextmanager
def under_way(peer: Peer, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request that the engine has begun; it is answered after the block."""
    with ThreadPoolExecutor(1) as pool:
        with single_steps(peer.live) as step:
            answer = pool.submit(
                peer.http.post, path, json={**body, "max_tokens": 8, "ignore_eos": True}
            )
            while not any(
                slot.state in ("prefilling", "running")
                for slot in peer.live.service.engine.snapshot().slots
            ):
                step()
            yield
        assert answer.result().status_code == 200


def turn_under_way(peer: Peer, agent: str, text: str) -> AbstractContextManager[None]:
    body = {"append": [{"role": "user", "content": text}]}
    return under_way(peer, f"/v1/agents/{agent}/generate", body)


def test_a_turn_in_one_service_refuses_those_of_the_other(pair: Pair) -> None:
    one, other = pair
    assert turn(one, "bob", "first").status_code == 200
    with turn_under_way(one, "bob", "from one"):
        refused = turn(other, "bob", "from the other")
    assert refused.status_code == 409 and "another service" in refused.text
    assert turn(other, "bob", "again").status_code == 200
    assert said(one, "bob") == said(other, "bob") == ["first", "from one", "again"]


def test_a_patient_turn_waits_for_the_other_service(pair: Pair) -> None:
    one, other = pair
    with ThreadPoolExecutor(1) as pool:
        with turn_under_way(one, "eve", "from one"):
            waited = pool.submit(turn, other, "eve", "from the other", queue=True)
            wait_until(lambda: other.live.service.agent_locks.is_busy("eve"))
        assert waited.result().status_code == 200
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
    with turn_under_way(one, "zoe", "from one"):
        refused = {
            "rewind": other.http.post("/v1/agents/zoe/rewind", json={"n_messages": 0}),
            "delete": other.http.delete("/v1/agents/zoe"),
            "create": other.http.post("/v1/agents", json={"id": "zoe"}),
            "fork": other.http.post("/v1/agents/zoe/fork", json={"id": "zoe"}),
        }
        changed = other.http.post("/v1/agents/zoe", json={"priority": "low"})
    for name, answer in refused.items():
        assert answer.status_code == 409 and "another service" in answer.text, name
    assert changed.status_code == 200
    assert said(one, "zoe") == said(other, "zoe") == ["first", "from one"]
    assert other.http.delete("/v1/agents/zoe").status_code == 200
    assert one.http.get("/v1/agents/zoe/history").status_code == 404


def test_a_turn_waits_for_a_request_of_the_other_service(pair: Pair) -> None:
    """The request replaces the history by its own conversation when it ends."""
    one, other = pair
    body = {"messages": [{"role": "user", "content": "from one"}], "agent": "kim"}
    with ThreadPoolExecutor(1) as pool:
        with under_way(one, "/v1/chat/completions", body):
            assert turn(other, "kim", "too early").status_code == 409
            added = pool.submit(turn, other, "kim", "from the other", queue=True)
            wait_until(lambda: other.live.service.agent_locks.is_busy("kim"))
        assert added.result().status_code == 200
    assert said(one, "kim") == ["from one", "from the other"]


def test_a_turn_in_one_service_keeps_what_the_other_set(model_folder: Path, tmp_path: Path) -> None:
    stored = AgentFolders(tmp_path / "agents")
    with sharing(tiny_preset(model_folder), tmp_path) as (one, other):
        for peer in (one, other):
            assert turn(peer, "kit", "hello").status_code == 200
        one.http.post("/v1/agents/kit", json={"priority": "high"}).raise_for_status()
        other.http.post("/v1/agents/kit", json={"is_pinned": True}).raise_for_status()
        for peer in (other, one):
            assert turn(peer, "kit", "and again").status_code == 200
        one.http.post("/v1/agents/kit/fork", json={"id": "kim"}).raise_for_status()
    facts = stored.read("kit").facts
    assert (facts["priority"], facts["is_pinned"]) == (Priority.HIGH, True)
    assert stored.read("kim").facts["is_pinned"] is False
