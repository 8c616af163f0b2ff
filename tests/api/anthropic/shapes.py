"""Requests in the shape of Claude Code's, filled with words of our own."""

import json
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from tests.api.requests import prompt_of

Body = dict[str, Any]

SESSION = str(UUID(int=7))
CACHED = {"cache_control": {"type": "ephemeral"}}


def tool(name: str, n_words: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A tool whose description and schema have so many words each."""
    properties = {
        f"field{i}": {"type": "string", "description": prompt_of(8, seed + i)}
        for i in range(max(1, n_words // 8))
    }
    return {
        "name": name,
        "description": prompt_of(n_words, seed),
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": ["field0"],
            "additionalProperties": False,
        },
        **more,
    }


def tools(n: int, n_words: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many tools, in alphabetical order."""
    return [tool(f"Tool{chr(65 + i)}", n_words, seed + 100 * i) for i in range(n)]


def found_later() -> list[dict[str, Any]]:
    """Tools that a search finds; they are inserted in the middle of the list."""
    return [tool("ToolBweb", 20, 900, defer_loading=True), tool("ToolCweb", 20, 950,
            defer_loading=True)]  # fmt: skip


def opening(text: str, suffix: str = "715", **more: Any) -> Body:
    """The first request of a conversation: head, user, and a system message after it."""
    return {
        "model": "local-model",
        "messages": [
            {"role": "user", "content": [reminder(1), reminder(2), {"type": "text", "text": text}]},
            {"role": "system", "content": [{"type": "text", "text": prompt_of(40, 3), **CACHED}]},
        ],
        "system": [
            {"type": "text", "text": billing(suffix)},
            {"type": "text", "text": "You are an agent of these tests.", **CACHED},
            {"type": "text", "text": prompt_of(90, 4), **CACHED},
        ],
        "tools": [*tools(4, 16), placeholder()],
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": SESSION})},
        "max_tokens": 4,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "temperature": 0,
        **more,
    }


def following(before: Body, answer: Iterable[dict[str, Any]], *content: Any, **more: Any) -> Body:
    """The next request: the marks of caching have moved, and lists of one text became strings."""
    grown = [
        *(_undressed(message) for message in before["messages"]),
        {"role": "assistant", "content": list(answer)},
        {"role": "user", "content": [*content[:-1], {**content[-1], **CACHED}]},
    ]
    return {**before, "messages": grown, **more}


def title(text: str) -> Body:
    """The small request that names a conversation while its first turn runs."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    return {
        "model": "small-model",
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "system": [{"type": "text", "text": billing("0aa")}, {"type": "text", "text": "Name it."}],
        "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }


def subagent(text: str) -> Body:
    """A helper's request: the same session, fewer tools, another head."""
    body = opening(text, "3f6; cc_is_subagent=true")
    return {**body, "tools": [*tools(2, 16), placeholder()]}


def canned(name: str, **arguments: Any) -> list[dict[str, Any]]:
    """An assistant turn as a client sends it back."""
    return [
        {"type": "thinking", "thinking": "thinking text", "signature": "bG9jYWw="},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments},
    ]


def result(content: Any, **more: Any) -> dict[str, Any]:
    """What came of the canned call."""
    return {"tool_use_id": "toolu_1", "type": "tool_result", "content": content, **more}


def billing(suffix: str) -> str:
    """What differs per conversation, or per request, at the very head."""
    return f"x-anthropic-billing-header: cc_version=2.1.329.{suffix}; cc_entrypoint=sdk-cli;"


def reminder(seed: int) -> dict[str, Any]:
    """The first blocks of the first turn."""
    text = f"<system-reminder>\n{prompt_of(30, seed)}\n</system-reminder>\n"
    return {"type": "text", "text": text}


def placeholder() -> dict[str, Any]:
    """Never to be called, never to be seen."""
    return {
        "name": "ToolDeferred",
        "description": "Stands for tools that can be searched.",
        "input_schema": {"type": "object", "properties": {}},
        "defer_loading": True,
    }


def _undressed(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    bare = [{k: v for k, v in block.items() if k != "cache_control"} for block in content]
    is_single = len(bare) == 1 and set(bare[0]) == {"type", "text"} and message["role"] == "system"
    return {**message, "content": bare[0]["text"] if is_single else bare}
