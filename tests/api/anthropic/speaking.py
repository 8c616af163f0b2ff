"""Short ways to ask the Anthropic door, and a strict reading of what it streams."""

import json
from typing import Any

import httpx
from anthropic.types import RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

PATH = "/v1/messages"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

# Random weights never close a thought, so most tests switch thinking off.
PLAIN: dict[str, Any] = {"thinking": {"type": "disabled"}, "temperature": 0}

Event = dict[str, Any]


def body(text: str = "tell me a story", **more: Any) -> dict[str, Any]:
    """A greedy body with one user message."""
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, **PLAIN, **more}


def ask(http: httpx.Client, sent: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole answer that went well."""
    answer = http.post(PATH, json=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def n_prompt(usage: dict[str, int]) -> int:
    """All tokens of the prompt, as clients add them up."""
    return sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))


def stream(http: httpx.Client, sent: dict[str, Any]) -> list[Event]:
    """The events of a stream, each checked, and all of them in order."""
    with http.stream("POST", PATH, json={**sent, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["request-id"].startswith("req_")
        text = "".join(answer.iter_text())
    found = events(text)
    in_order(found)
    return found


def events(text: str) -> list[Event]:
    """Frames to events: names agree with types, and every field is one the SDK knows."""
    assert "\r" not in text
    assert text.endswith("\n\n")
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            nothing_unknown(EVENTS.validate_python(event, strict=True))
        found.append(event)
    return found


def in_order(found: list[Event]) -> None:
    """1.4 of the wire protocols: one block open at a time, indices without gaps."""
    kinds = [event["type"] for event in found if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == 1
    n_blocks = 0
    is_open = False
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == n_blocks
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == n_blocks
            case "content_block_stop":
                assert is_open
                assert event["index"] == n_blocks
                n_blocks = n_blocks + 1
                is_open = False
            case "message_delta":
                assert not is_open
    assert n_blocks >= 1


def blocks(found: list[Event]) -> list[dict[str, Any]]:
    """The content blocks that the events of a stream add up to."""
    made: list[dict[str, Any]] = []
    partial = ""
    for event in found:
        match event["type"]:
            case "content_block_start":
                made.append(dict(event["content_block"]))
                partial = ""
            case "content_block_delta":
                delta = event["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        made[-1][name] += delta[name]
                partial += delta.get("partial_json", "")
            case "content_block_stop" if partial:
                made[-1]["input"] = json.loads(partial)
    return made


def nothing_unknown(model: BaseModel) -> None:
    """Whatever the SDK does not know of would land in `model_extra`."""
    assert not model.model_extra, model
    for _, value in model:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                nothing_unknown(one)
