"""Bodies and streams of the fleet's two dialects."""

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.bench.fleet.session import JsonObject, PromptedRequest
from mlxstack.bench.stream_client import Pieces, event_data
from mlxstack.core.errors import Broken

MAX_SHOWN = 300
"""Bytes of an event in an error."""


class FleetDialect(StrEnum):
    """FleetDialect of a server; the value is what a person types."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Piece(Struct, frozen=True):
    """Piece of an answer and its arrival, in seconds."""

    moment: float
    text: str


class StreamedAnswer(Struct, frozen=True):
    """Answer of one request; counts are tokens as the server gives them."""

    pieces: tuple[Piece, ...]
    n_prompt: int = 0
    n_reused: int = 0
    n_answer: int = 0

    @property
    def text(self) -> str:
        """Text, thoughts, names and arguments of calls, in their order."""
        return "".join(piece.text for piece in self.pieces)


def path(dialect: FleetDialect) -> str:
    """Path of requests."""
    if dialect is FleetDialect.ANTHROPIC:
        return "/v1/messages"
    return "/v1/chat/completions"


def body(request: PromptedRequest, dialect: FleetDialect, model: str) -> JsonObject:
    """Greedy, streamed request without thoughts; repetitions have the recorded length too."""
    common: JsonObject = {
        "model": model,
        "max_tokens": request.n_answer,
        "temperature": 0,
        "stream": True,
        "stop_loops": False,
    }
    if dialect is FleetDialect.ANTHROPIC:
        return {**common, **_anthropic(request)}
    openai: JsonObject = {
        "messages": request.messages,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if request.tools:
        openai["tools"] = request.tools
    return {**common, **openai}


def as_text(request: PromptedRequest) -> PromptedRequest:
    """Request with tools, calls and results as text."""
    described = "\n".join(json.dumps(tool["function"]) for tool in request.tools)
    head, *following = request.messages
    if described:
        head = {**head, "content": f"{head.get('content') or ''}\n\n{described}"}
    return msgspec.structs.replace(
        request, messages=tuple(_alternating([head, *map(_plain, following)])), tools=()
    )


def _plain(message: JsonObject) -> JsonObject:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result:\n{content}"}
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": "\n".join([content, *calls]).strip()}


def _alternating(messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Neighboring messages of a role as one, for templates that alternate roles."""
    for role, group in groupby(messages, key=lambda message: message["role"]):
        yield {"role": role, "content": "\n\n".join(message["content"] for message in group)}


def _anthropic(request: PromptedRequest) -> JsonObject:
    system = [m["content"] for m in request.messages if m["role"] == "system"]
    messages = [_blocks(message) for message in request.messages if message["role"] != "system"]
    merged = [
        {"role": role, "content": [block for message in group for block in message["content"]]}
        for role, group in groupby(messages, key=lambda message: message["role"])
    ]
    translated: JsonObject = {"system": "\n\n".join(system), "messages": merged}
    if request.tools:
        translated["tools"] = [_anthropic_tool(tool["function"]) for tool in request.tools]
    return translated


def _anthropic_tool(function: JsonObject) -> JsonObject:
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object"},
    }


def _blocks(message: JsonObject) -> JsonObject:
    content = message.get("content") or ""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
        return {"role": "user", "content": [block]}
    blocks: list[JsonObject] = [{"type": "text", "text": content}] if content else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return {"role": message["role"], "content": blocks}


def read(pieces: Pieces, dialect: FleetDialect) -> StreamedAnswer:
    """Answer of server-sent events. Raises Broken for an event without JSON."""
    texts: list[Piece] = []
    usage: dict[str, Any] = {}
    for moment, data in event_data(pieces):
        event = _event(data)
        if dialect is FleetDialect.ANTHROPIC:
            text = _anthropic_text(event)
            usage |= event.get("message", event).get("usage") or {}
        else:
            text = "".join(_openai_text(choice) for choice in event.get("choices") or ())
            usage |= event.get("usage") or {}
        if text:
            texts.append(Piece(moment, text))
    return _counted(tuple(texts), usage, dialect)


def _counted(
    pieces: tuple[Piece, ...], usage: dict[str, Any], dialect: FleetDialect
) -> StreamedAnswer:
    if dialect is FleetDialect.ANTHROPIC:
        n_reused = usage.get("cache_read_input_tokens") or 0
        n_new = usage.get("input_tokens", 0) + (usage.get("cache_creation_input_tokens") or 0)
        return StreamedAnswer(pieces, n_new + n_reused, n_reused, usage.get("output_tokens", 0))
    details = usage.get("prompt_tokens_details") or {}
    return StreamedAnswer(
        pieces,
        usage.get("prompt_tokens", 0),
        details.get("cached_tokens") or 0,
        usage.get("completion_tokens", 0),
    )


def _event(data: bytes) -> JsonObject:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        text = data[:MAX_SHOWN]
        raise Broken(f"the stream holds an event that is no JSON: {text!r}") from error


def _openai_text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    texts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts += [function.get("name"), function.get("arguments")]
    return "".join(text for text in texts if text)


def _anthropic_text(event: dict[str, Any]) -> str:
    block = event.get("content_block") or {}
    delta = event.get("delta") or {}
    texts = [block.get("name"), delta.get("thinking"), delta.get("text"), delta.get("partial_json")]
    return "".join(text for text in texts if text)
