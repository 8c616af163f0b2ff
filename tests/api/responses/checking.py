"""Streams of the Responses dialect, checked as strictly as the SDK's own types allow."""

import json
from collections.abc import Iterable
from typing import Any, get_args

import httpx
from msgspec import Struct
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

KINDS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
LAST = ("response.completed", "response.incomplete", "response.failed")
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}


class Told(Struct):
    """The events of one stream, and the response of its last one."""

    events: list[dict[str, Any]]
    response: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one type."""
        return [event for event in self.events if event["type"] == f"response.{kind}"]

    @property
    def kinds(self) -> list[str]:
        """The types in their order, repetitions left out."""
        found = [event["type"].removeprefix("response.") for event in self.events]
        return [kind for i, kind in enumerate(found) if i == 0 or found[i - 1] != kind]


def whole(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """A response that went well, of the SDK's type."""
    answer = http.post("/v1/responses", json={**PLAIN, **body})
    assert answer.status_code == 200, answer.text
    Response.model_validate_json(answer.text, strict=True)
    return dict(answer.json())


def told(http: httpx.Client, body: dict[str, Any]) -> Told:
    """A stream that holds together, every event of the SDK's type."""
    with http.stream("POST", "/v1/responses", json={**PLAIN, **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = "".join(answer.iter_text())
    return check(text)


def check(text: str) -> Told:
    """Raises AssertionError or ValidationError where a client would stumble."""
    assert "\r" not in text
    assert text.endswith("\n\n")
    events = [_event(frame) for frame in text.removesuffix("\n\n").split("\n\n")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in LAST for event in events] == [False] * (len(events) - 1) + [True]
    found = Told(events, events[-1]["response"])
    assert {e["response"]["id"] for e in events if "response" in e} == {found.response["id"]}
    _check_items(found)
    return found


def _event(frame: str) -> dict[str, Any]:
    name, data = frame.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    KINDS[event["type"]].model_validate_json(data.removeprefix("data: "), strict=True)
    return dict(event)


def _check_items(found: Told) -> None:
    """One item open at a time, in order, and the response made of them.

    A text has a part that was added before, which the helper of openai-node looks for.
    """
    done = [event["item"] for event in found.of("output_item.done")]
    assert found.response["output"] == done
    added = found.of("output_item.added")
    assert [event["output_index"] for event in added] == list(range(len(added)))
    is_open = None
    parts = set()
    known = list[str]()
    for event in found.events:
        for index in ("content_index", "summary_index"):
            if index in event:
                part = event["item_id"], index, event[index]
                if event["type"].endswith("_part.added"):
                    parts.add(part)
                assert part in parts, event
        if "response" in event:
            assert [item["id"] for item in event["response"]["output"]] == known
        if event["type"] == "response.output_item.added":
            assert is_open is None
            is_open = event["item"]["id"], event["output_index"]
            known.append(event["item"]["id"])
        elif event["type"] == "response.output_item.done":
            assert (event["item"]["id"], event["output_index"]) == is_open
            is_open = None
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == is_open
    for item in done:
        _check_deltas(found, item)


def _check_deltas(found: Told, item: dict[str, Any]) -> None:
    deltas = "".join(
        e["delta"]
        for e in found.events
        if e.get("item_id") == item["id"] and "delta" in e and "summary_index" not in e
    )
    match item["type"]:
        case "message" | "reasoning":
            assert deltas == "".join(part["text"] for part in item["content"])
        case "function_call":
            assert deltas == item["arguments"]
            if item["status"] == "completed":
                assert isinstance(json.loads(deltas), dict)
        case "custom_tool_call":
            assert deltas == item["input"]


def text_of(output: Iterable[dict[str, Any]]) -> str:
    """All words of the messages among these items."""
    return "".join(p["text"] for i in output if i["type"] == "message" for p in i["content"])
