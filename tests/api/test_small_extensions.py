"""Smaller wishes of clients: prefill alone, timings on the way, roles and parts of the past."""

from typing import Any

import httpx
import pytest

from tests.api.requests import PLAIN, chat, chat_body, chunks, prompt_of

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
def test_a_limit_of_0_computes_the_prompt_alone(http: httpx.Client, name: str) -> None:
    body = {"prompt": prompt_of(40), name: 0, "id_slot": 1}
    made = http.post("/completion", json=body).raise_for_status().json()
    assert made["content"] == ""
    assert made["tokens_predicted"] == 0
    assert made["stop_type"] == "limit"
    assert made["timings"]["prompt_n"] > 30
    after = http.post("/completion", json={**body, name: 4}).json()
    assert after["timings"]["cache_n"] >= made["tokens_evaluated"] - 1
    streamed = chunks(http, "/completion", body)
    assert [one["content"] for one in streamed] == [""]
    assert streamed[-1]["stop"] is True


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_elsewhere_a_limit_of_0_is_refused_by_its_name(http: httpx.Client, name: str) -> None:
    body = {**chat_body(), name: 0}
    if name != "max_tokens":
        del body["max_tokens"]
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body()),
        ("/v1/completions", {"prompt": "once", "temperature": 0}),
        ("/completion", {"prompt": "once", "temperature": 0}),
    ],
)
def test_timings_per_token_grow_to_the_last(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "max_tokens": 6, "ignore_eos": True}
    assert sum("timings" in one for one in chunks(http, path, body)) == 1
    found = [
        one["timings"]
        for one in chunks(http, path, {**body, "timings_per_token": True})
        if "timings" in one
    ]
    counts = [one["predicted_n"] for one in found]
    assert len(found) > 2
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 6
    assert all(one["cache_n"] + one["prompt_n"] > 0 for one in found)


def test_developers_speak_as_the_system(http: httpx.Client) -> None:
    def prompt(role: str) -> str:
        messages = [{"role": role, "content": "Rules."}, {"role": "user", "content": "hi"}]
        answer = http.post("/apply-template", json={"messages": messages, **PLAIN})
        return str(answer.raise_for_status().json()["prompt"])

    assert prompt("developer") == prompt("system")
    assert "developer" not in prompt("developer")


def test_images_of_the_past_are_noted_and_new_ones_refused(http: httpx.Client) -> None:
    seen = {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}
    past = [seen, {"role": "assistant", "content": "I cannot."}, {"role": "user", "content": "ok"}]
    shown = {"role": "tool", "tool_call_id": "c", "content": [IMAGE, {"type": "of_the_future"}]}
    answer = http.post("/apply-template", json={"messages": [*past, shown]}).json()
    assert "look\n[image omitted]" in answer["prompt"]
    assert answer["prompt"].count("[image omitted]") == 2
    chat(http, messages=past)
    refused = http.post(CHAT, json={**chat_body(), "messages": [*past, seen]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[3].content"
