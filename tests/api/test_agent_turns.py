"""What is said to an agent and done to it at once: nothing that was answered 200 is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from mlxstack.service.calls import agents
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.files import Disk
from tests.api.running import Running, running, tiny_preset
from tests.api.test_agents import history, turn, user
from tests.patience import PATIENCE_S, wait_until
from tests.store.bad_disks import FullDisk

pytestmark = [pytest.mark.mlx, pytest.mark.net]

Answer = Future[httpx.Response]


class Pause:
    """The first call of a method waits, before or after its work, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.begun, self._may_end = threading.Event(), threading.Event()
        self._work = getattr(owner, name)
        self._is_first = True
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: object) -> object:
        if not self._is_first:
            return self._work(*args)
        self._is_first = False
        self.begun.set()
        self._may_end.wait(PATIENCE_S)
        return self._work(*args)

    def end(self) -> None:
        self._may_end.set()


class Late(Pause):
    """The first call does its work, and then waits."""

    def __call__(self, *args: object) -> object:
        if not self._is_first:
            return self._work(*args)
        self._is_first = False
        done = self._work(*args)
        self.begun.set()
        self._may_end.wait(PATIENCE_S)
        return done


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def questions(http: httpx.Client, agent: str) -> list[str]:
    return [one["content"] for one in history(http, agent) if one["role"] == "user"]


def during(pause: Pause, first: Answer, second: Callable[[], Answer]) -> tuple[int, int]:
    """Statuses, when the second comes while the first is in the middle."""
    assert pause.begun.wait(PATIENCE_S)
    later = second()
    time.sleep(0.4)
    pause.end()
    return first.result(PATIENCE_S).status_code, later.result(PATIENCE_S).status_code


def test_a_change_during_a_turn_costs_no_turn(
    live: Running, http: httpx.Client, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(http, "abe", user("one"))
    pause = Late(monkeypatch, live.service.agent_store, "read")
    there = "/v1/agents/abe"
    body = {"append": [user("two")], "max_tokens": 2}
    change = pool.submit(http.post, there, json={"priority": "low"})
    both = during(pause, change, lambda: pool.submit(http.post, f"{there}/generate", json=body))
    assert both == (200, 200)
    assert questions(http, "abe") == ["one", "two"]
    assert http.get(there).json()["priority"] == "low"


class Deed(NamedTuple):
    """A request, the method of the library that it is in meanwhile, and what is left."""

    method: str
    path: str
    body: Any
    paused: str
    left: list[str]


DELETED = Deed("DELETE", "", None, "remove", ["three"])
REWOUND = Deed("POST", "/rewind", {"n_messages": 2}, "write", ["one", "three"])


@pytest.mark.parametrize("deed", [DELETED, REWOUND])
def test_what_was_deleted_or_rewound_stays_so_when_a_turn_comes_meanwhile(
    http: httpx.Client,
    pool: ThreadPoolExecutor,
    live: Running,
    monkeypatch: pytest.MonkeyPatch,
    deed: Deed,
) -> None:
    for text in ("one", "two"):
        turn(http, "ben", user(text))
    pause = Pause(monkeypatch, live.service.agent_store, deed.paused)
    there = "/v1/agents/ben"
    sent = pool.submit(http.request, deed.method, there + deed.path, json=deed.body)
    more = {"append": [user("three")], "max_tokens": 2}
    both = during(pause, sent, lambda: pool.submit(http.post, f"{there}/generate", json=more))
    assert both == (200, 200)
    assert questions(http, "ben") == deed.left
    http.delete(there)


def test_one_of_two_who_create_the_same_agent_is_refused(
    live: Running, http: httpx.Client, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(text: str) -> Answer:
        return pool.submit(http.post, "/v1/agents", json={"id": "cyd", "messages": [user(text)]})

    pause = Late(monkeypatch, live.service.agent_store, "has")
    assert during(pause, create("one"), lambda: create("two")) == (200, 409)
    assert questions(http, "cyd") == ["one"]


def test_histories_are_written_in_the_order_of_the_answers(
    live: Running, http: httpx.Client, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*texts: str) -> Answer:
        body = {"session_id": "dot", "messages": [user(t) for t in texts], "max_tokens": 2}
        return pool.submit(http.post, "/v1/chat/completions", json=body)

    pause = Pause(monkeypatch, live.service.agent_store, "write")
    assert during(pause, ask("one"), lambda: ask("one", "two")) == (200, 200)
    assert questions(http, "dot") == ["one", "two"]


def test_of_two_turns_at_once_one_is_refused(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    body = {"append": [user("x")], "max_tokens": 30, "ignore_eos": True}
    for n in range(8):
        start = threading.Barrier(2)

        def one(n: int = n, start: threading.Barrier = start) -> int:
            start.wait()
            return http.post(f"/v1/agents/eva-{n}/generate", json=body).status_code

        assert sorted(f.result(PATIENCE_S) for f in (pool.submit(one), pool.submit(one))) == [
            200,
            409,
        ]


def test_g12_a_turn_that_a_full_disk_did_not_take_is_written_with_the_next(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(http, "fay", user("one"))
    folders = live.service.agent_store._folders
    assert folders is not None
    monkeypatch.setattr(folders, "_disk", FullDisk(0))
    turn(http, "fay", user("two"))
    assert questions(http, "fay") == ["one", "two"]
    monkeypatch.setattr(folders, "_disk", Disk())
    turn(http, "fay", user("three"))
    assert questions(http, "fay") == ["one", "two", "three"]
    assert len(folders.read("fay").messages) == 6


@pytest.mark.parametrize("end", ["stop", "unload", "swap"])
def test_g12_a_turn_that_a_full_disk_did_not_take_is_written_at_the_end(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    preset = tiny_preset(model_folder, server=ServerSpec(port=0, idle_unload_s=600))
    reader = AgentFolders(tmp_path / "agents")
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        turn(http, "fay", user("one"))
        folders = found.service.agent_store._folders
        assert folders is not None
        monkeypatch.setattr(folders, "_disk", FullDisk(0))
        turn(http, "fay", user("two"))
        monkeypatch.setattr(folders, "_disk", Disk())
        assert len(reader.read("fay").messages) == 2
        if end == "unload":
            http.post("/v1/models/unload").raise_for_status()
        elif end == "swap":
            again = {"model": str(model_folder)}
            http.post("/v1/models/load", json=again).raise_for_status()
        if end != "stop":
            assert len(reader.read("fay").messages) == 4
    assert len(reader.read("fay").messages) == 4


def test_g12_an_agent_that_a_full_disk_did_not_take_is_not_there(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = live.service.agent_store._folders
    assert folders is not None
    monkeypatch.setattr(folders, "_disk", FullDisk(0))
    refused = http.post("/v1/agents", json={"id": "nia", "messages": [user("one")]})
    monkeypatch.setattr(folders, "_disk", Disk())
    assert refused.status_code == 507, refused.text
    assert http.get("/v1/agents/nia").status_code == 404
    assert "nia" not in {one["id"] for one in http.get("/v1/agents").json()["data"]}
    assert http.post("/v1/agents", json={"id": "nia"}).status_code == 200


def test_agents_are_told_of_a_sweep(model_folder: Path, tmp_path: Path) -> None:
    with (
        running(tiny_preset(model_folder), tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        turn(http, "gil", user("one"))
        http.post("/slots/0?action=erase").raise_for_status()
        wait_until(lambda: found.service.agent_store.stored("gil"))
        (kept,) = (tmp_path / "agents" / "gil").glob("*/manifest.json")
        os.utime(kept, (1, 1))
        swept = http.post("/cache/gc", json={"max_age_s": 3600, "scope": "all"})
        assert str(kept) in swept.text
        assert not found.service.agent_store.stored("gil")


def test_there_are_only_so_many_agents(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(http, "hal", user("one"))
    monkeypatch.setattr(agents, "MAX_AGENTS", live.service.agent_registry.n_agents)
    said = {"messages": [user("hi")], "max_tokens": 2, "agent": "ida"}
    for path, body in (
        ("/v1/agents", {"id": "ida"}),
        ("/v1/agents/hal/fork", {"id": "ida"}),
        ("/v1/chat/completions", said),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 409
        assert "delete those that are over" in refused.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json={**said, "agent": "hal"}).status_code == 200
    del said["agent"]
    assert http.post("/v1/chat/completions", json=said).status_code == 200
