"""Tenants side by side: nobody learns from the service what another salt or agent was told."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from mlxstack.core.preset import ApiKey, ServerSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
KEYS = (
    "plain",
    ApiKey("team", salt="team's"),
    ApiKey("guest", salt="guests'", agents=("night-*",)),
    ApiKey("claudes", agents=("claude-*", "chat-*")),
)
WORDS = " ".join(f"word{n}" for n in range(120))


class House(NamedTuple):
    """A service with tenants."""

    url: str

    def call(self, key: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"x-api-key": key, **more.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=PATIENCE_S, **more)

    def say(self, key: str, *texts: str, **more: Any) -> httpx.Response:
        """A conversation of a user's and an assistant's words in turn."""
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        headers = more.pop("headers", {})
        body = {"messages": turns, "max_tokens": 1, **more}
        return self.call(key, "POST", CHAT, json=body, headers=headers).raise_for_status()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("tenants")
    preset = tiny_preset(folder / "model", server=ServerSpec(port=0, api_keys=KEYS))
    with running(preset, folder / "home") as found:
        yield House(found.url)


def reason(answer: httpx.Response) -> str:
    return answer.headers.get("x-mlx-stack-cache-miss-reason", "")


def named(answer: httpx.Response) -> str:
    return str(answer.headers["x-mlx-stack-agent"])


@pytest.mark.parametrize("key", ["guest", "team"])
def test_another_salt_does_not_learn_where_a_conversation_differs(house: House, key: str) -> None:
    mine = ("What is the code?", "It is tulip forty two, keep it.", "thanks")
    first = house.say("plain", *mine)
    guessed = house.say(key, mine[0], "It is tulip nine.", mine[2])
    assert reason(guessed) == "cold"
    assert named(guessed) != named(first)
    assert reason(house.say(key, mine[0], "It is rose.", mine[2])).startswith("diverged at token")


def test_the_name_does_not_tell_what_somebody_said_under_another_salt(house: House) -> None:
    house.say("plain", "Only the day team knows this sentence.")
    known, unknown = (
        named(house.say("guest", text, user="me"))
        for text in ("Only the day team knows this sentence.", "And nobody this one.")
    )
    assert known.startswith("user-")
    assert unknown.startswith("user-")


def test_a_key_of_some_agents_does_not_own_conversations_without_a_name(house: House) -> None:
    claude = {"x-claude-code-session-id": "s1"}
    name = named(house.say("plain", "Fix the tests.", headers=claude))
    assert name.startswith("claude-")
    house.call("claudes", "POST", "/v1/agents", json={"id": "claude-mine"}).raise_for_status()
    listed = house.call("claudes", "GET", "/v1/agents").json()["data"]
    assert {one["id"] for one in listed} == {"claude-mine"}
    there = f"/v1/agents/{name}"
    hello = [{"role": "user", "content": "Hello."}]
    tries = [
        house.call("claudes", "GET", there),
        house.call("claudes", "POST", there, json={"is_pinned": True}),
        house.call("claudes", "DELETE", there),
        house.call("claudes", "DELETE", f"{there}?evict_only=1"),
        house.call("claudes", "POST", f"{there}/fork", json={"id": "claude-other"}),
        house.call("claudes", "POST", "/v1/agents/claude-mine/fork", json={"id": name}),
        house.call("claudes", "POST", "/v1/agents", json={"id": name}),
        house.call("claudes", "POST", "/v1/agents", json={"id": "chat-0123abcd.2"}),
        house.call("claudes", "POST", f"{there}/generate", json={"messages": hello}),
        house.call("claudes", "POST", CHAT, json={"messages": hello, "agent": name}),
    ]
    assert [one.status_code for one in tries] == [403] * len(tries)
    assert "conversations without one" in tries[0].json()["error"]["message"]
    assert not house.call("plain", "GET", there).raise_for_status().json()["is_explicit"]


def test_what_a_salted_key_warms_or_pins_is_its_own(house: House) -> None:
    for verb, path in enumerate(("/cache/warm", "/cache/prefixes")):
        system = {"role": "system", "content": f"Rule {verb}: read the book. {WORDS}"}
        body = {"name": "book", "messages": [system]}
        done = house.call("team", "POST", path, json=body).raise_for_status()
        assert done.json()["n_tokens"] >= 128
        asked = [system, {"role": "user", "content": "Go on."}]
        hits = [
            house.call(key, "POST", CHAT, json={"messages": asked, "max_tokens": 1}).headers
            for key in ("plain", "team")
        ]
        n_cached = [int(one["x-mlx-stack-cache-prefix-tokens"]) for one in hits]
        assert n_cached[0] < 128 <= n_cached[1]


def test_of_others_slots_a_key_of_some_agents_sees_only_whether_they_are_busy(house: House) -> None:
    def seen(key: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = house.call(key, "GET", "/slots").json()
        return found

    for slot, (key, agent) in enumerate((("plain", "day"), ("guest", "night-1"), ("guest", None))):
        house.say(key, "Hello.", agent=agent, id_slot=slot)
    bare = {"id", "n_ctx", "speculative", "is_processing"}
    whole = set(seen("plain")[1])
    assert [set(one) for one in seen("guest")] == [bare, whole, bare]
    assert seen("guest")[1]["agent"] == "night-1"
    raw = {"prompt": WORDS, "n_predict": 1, "id_slot": 0}
    house.call("plain", "POST", "/completion", json=raw).raise_for_status()
    assert seen("plain")[0]["agent"] is None
    assert [set(one) for one in seen("guest")] == [bare, whole, bare]


def test_a_key_of_some_agents_reads_no_totals_and_no_path(house: House) -> None:
    refused = house.call("guest", "GET", "/metrics")
    assert refused.status_code == 403
    assert "all agents" in refused.json()["error"]["message"]
    told = house.call("plain", "GET", "/metrics").raise_for_status()
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert house.call("guest", "GET", "/props").raise_for_status().json()["model_path"] == ""
    assert house.call("plain", "GET", "/props").json()["model_path"].endswith("model")
