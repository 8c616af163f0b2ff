"""`cache: drop` in every dialect, and the kinds of turns that a client's headers mark."""

from typing import Any

import httpx
import pytest

from tests.api.requests import chat_body, prompt_of

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": prompt_of(30, 4)}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": prompt_of(30, 4), "max_output_tokens": 16},
    "/v1/completions": {"prompt": prompt_of(30, 4), "max_tokens": 2},
    "/completion": {"prompt": prompt_of(30, 4), "n_predict": 2},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 2}},
}
TITLE = {
    "messages": [
        {"role": "system", "content": "You are a title generator. You output one line."},
        *USER,
    ],
    "max_tokens": 2,
}
SUBAGENT = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a4b"}


def kept_state(http: httpx.Client) -> list[Any]:
    """Agents, and the contexts of the slots."""
    agents = [agent["id"] for agent in http.get("/v1/agents").json()["data"]]
    slots = [(s["id"], s["n_tokens"], s["agent"]) for s in http.get("/slots").json()]
    return [sorted(agents), slots]


@pytest.mark.parametrize("path", BODIES)
def test_a_dropped_request_leaves_no_agent_and_no_context(http: httpx.Client, path: str) -> None:
    before = kept_state(http)
    by_body = http.post(path, json={**BODIES[path], "cache": "drop"}).raise_for_status()
    by_header = http.post(path, json=BODIES[path], headers={"X-MLX-Stack-Cache": "drop"})
    for answer in (by_body, by_header.raise_for_status()):
        assert answer.headers["x-mlx-stack-cache"] == "drop"
        assert "x-mlx-stack-agent" not in answer.headers
    assert kept_state(http) == before
    latest = http.get("/requests").json()[0]
    assert latest["drops_kv"]
    assert latest.get("agent") is None


def test_the_field_wins_over_the_header_and_the_kind(http: httpx.Client) -> None:
    by_kind = http.post(CHAT, json=TITLE)
    assert by_kind.headers["x-mlx-stack-cache"] == "drop"
    assert by_kind.headers["x-mlx-stack-turn"] == "helper, priority low"
    headers = {"X-MLX-Stack-Cache": "drop"}
    kept = http.post(CHAT, json={**TITLE, "cache": "keep"}, headers=headers)
    assert "x-mlx-stack-cache" not in kept.headers
    assert kept.headers["x-mlx-stack-agent"]


def test_a_wrong_value_is_refused_with_the_known_ones(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={**chat_body(), "cache": "never"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache"
    assert "drop, keep" in answer.json()["error"]["message"]


def test_the_turn_of_an_agent_is_not_dropped(http: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 2, "cache": "drop"}
    refused = http.post("/v1/agents/dropped/generate", json=body)
    assert refused.status_code == 400
    assert "/v1/chat/completions" in refused.json()["error"]["message"]
    answer = http.post(CHAT, json={**body, "session_id": "dropped"}).raise_for_status()
    assert "x-mlx-stack-agent" not in answer.headers
    assert http.get("/v1/agents/dropped").status_code == 404


def test_a_sub_agent_goes_after_persons_unless_its_priority_is_set(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": prompt_of(25, 77)}], "max_tokens": 2}
    person = http.post("/v1/messages", json=body)
    assert "x-mlx-stack-turn" not in person.headers
    answer = http.post("/v1/messages", json=body, headers=SUBAGENT)
    assert answer.headers["x-mlx-stack-turn"] == "sub-agent, priority low"
    name = answer.headers["x-mlx-stack-agent"]
    (slot,) = (s for s in http.get("/slots").json() if s["agent"] == name)
    assert (slot["turn_kind"], slot["priority"]) == ("sub-agent", "low")
    http.post(f"/v1/agents/{name}", json={"priority": "normal"}).raise_for_status()
    again = http.post("/v1/messages", json=body, headers=SUBAGENT)
    assert again.headers["x-mlx-stack-turn"] == "sub-agent, priority normal"
