"""Short ways to ask for what tests ask for all the time."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

# Random weights never close a thought, so most tests switch thinking off.
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}


def chat_body(text: str = "tell me a story", **more: Any) -> dict[str, Any]:
    """A greedy body with one user message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **PLAIN, **more}


def chat(http: httpx.Client, text: str = "tell me a story", **more: Any) -> dict[str, Any]:
    """A chat completion that went well."""
    answer = http.post("/v1/chat/completions", json=chat_body(text, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def frames(http: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """The payloads of a stream, comments left out, exactly as they were sent."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        text = "".join(answer.iter_text())
    assert "\r" not in text
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    return [event.removeprefix("data: ") for event in events if not event.startswith(":")]


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON payloads of a stream, without [DONE]."""
    return [json.loads(data) for data in frames(http, path, body) if data != "[DONE]"]


def prompt_of(n_words: int, seed: int = 0) -> str:
    """A long text that differs by seed from its first word on."""
    return " ".join(f"w{(seed * 7919 + i) % 997}" for i in range(n_words))


def contents(found: list[dict[str, Any]]) -> Iterator[str]:
    """The content deltas of chat chunks."""
    for chunk in found:
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]
