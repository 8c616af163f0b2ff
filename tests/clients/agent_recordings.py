"""Recorded sessions of real coding agents on a real coder, and answers as clients read them.

A file of `recordings` holds the requests of one client, each as the difference to an earlier one,
and what the model wrote. Words of vendors stand as `[[CHARACTERS:SEED]]`, for filler.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.bench.fleet.session import FILLER, filler

JsonObject = dict[str, Any]

RECORDINGS = Path(__file__).parent / "recordings"
TURNS = ("messages", "input")
"""Fields of bodies that hold the turns."""


class ReadCall(Struct, frozen=True):
    """Call of a tool as a client reads it; `arguments` is JSON, or free text."""

    id: str
    name: str
    arguments: str


class ReadAnswer(Struct, frozen=True):
    """Answer as a client reads it."""

    text: str
    calls: tuple[ReadCall, ...]
    is_whole: bool
    """Whether it has its end."""


class RecordedRequest(Struct, frozen=True, omit_defaults=True):
    """Request of a client, as the difference to an earlier one, and its answer."""

    path: str
    fields: JsonObject
    """Fields of the body that the earlier request had not, or not so."""
    turns: tuple[JsonObject, ...]
    """Messages or items after the kept ones."""
    said: str
    """Text that the model wrote, with its marks."""
    calls: tuple[ReadCall, ...] = ()
    """Calls that the service read from it."""
    base: int | None = None
    """Earlier request; None: none."""
    n_kept: int = 0
    """Its messages or items with which this request begins."""
    dropped: tuple[str, ...] = ()
    """Its fields that this request has not."""


class RecordedAgent(Struct, frozen=True):
    """Session of a client: its requests for answers, in order."""

    client: str
    requests: tuple[RecordedRequest, ...]


def recorded_agents(folder: Path = RECORDINGS) -> tuple[RecordedAgent, ...]:
    """Recorded sessions by name."""
    files = sorted(folder.glob("*.json"))
    return tuple(msgspec.json.decode(file.read_bytes(), type=RecordedAgent) for file in files)


def bodies(session: RecordedAgent) -> Iterator[JsonObject]:
    """Body of each request, with filler in its place."""
    known: list[JsonObject] = []
    for request in session.requests:
        base: JsonObject = {}
        if request.base is not None:
            base = known[request.base]
        body = {**base, **request.fields}
        for name in request.dropped:
            del body[name]
        key = turns_key(request.path)
        body[key] = [*base.get(key, ())[: request.n_kept], *request.turns]
        known.append(body)
        yield json.loads(inflated(json.dumps(body)))


def inflated(text: str) -> str:
    """Text with filler in its place."""
    return FILLER.sub(lambda mark: filler(int(mark[1]), mark[2]), text)


def turns_key(path: str) -> str:
    """Field of a body that holds its turns."""
    if "responses" in path:
        return "input"
    return "messages"


def read_answer(path: str, text: str) -> ReadAnswer:
    """Answer of a stream of server-sent events, of any dialect, or of one JSON object."""
    lines = (line for line in text.split("\n") if line.startswith("data: {"))
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    if text.lstrip().startswith("{"):
        events = [json.loads(text)]
    if "messages" in path:
        return _read_messages(events)
    if "responses" in path:
        return _read_responses(events)
    return _read_chat(events)


def _read_chat(events: Sequence[JsonObject]) -> ReadAnswer:
    choices = [choice for event in events for choice in event.get("choices", ())]
    deltas = [choice.get("delta") or choice.get("message", {}) for choice in choices]
    calls: dict[int, dict[str, str]] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        index = piece.get("index", len(calls))
        call = calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        named = {**piece.get("function", {}), "id": piece.get("id")}
        for key in call:
            call[key] += named.get(key) or ""
    return ReadAnswer(
        text="".join(delta.get("content") or "" for delta in deltas),
        calls=tuple(ReadCall(**call) for call in calls.values()),
        is_whole=any(choice.get("finish_reason") for choice in choices),
    )


def _read_messages(events: Sequence[JsonObject]) -> ReadAnswer:
    blocks: list[JsonObject] = []
    for event in events:
        if event["type"] == "message":
            blocks += event["content"]
        elif event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "text": "", "partial_json": ""})
        elif event["type"] == "content_block_delta":
            for key in ("text", "partial_json"):
                blocks[-1][key] += event["delta"].get(key, "")
    uses = (block for block in blocks if block["type"] == "tool_use")
    return ReadAnswer(
        text="".join(block.get("text", "") for block in blocks),
        calls=tuple(
            ReadCall(use["id"], use["name"], use.get("partial_json") or json.dumps(use["input"]))
            for use in uses
        ),
        is_whole=any(event["type"] in ("message", "message_stop") for event in events),
    )


def _read_responses(events: Sequence[JsonObject]) -> ReadAnswer:
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    parts = (part for item in items for part in item.get("content") or ())
    calls = (item for item in items if "call_id" in item)
    return ReadAnswer(
        text="".join(part.get("text", "") for part in parts),
        calls=tuple(
            ReadCall(call["call_id"], call["name"], call.get("arguments", call.get("input", "")))
            for call in calls
        ),
        is_whole=any(event["type"] == "response.completed" for event in events),
    )
