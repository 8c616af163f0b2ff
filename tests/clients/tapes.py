"""What real clients send one after the other: recorded, or in their shape with words of ours.

Recordings hold their vendors' words, so that none is part of this repository. Point
MLX_STACK_CAPTURES at a folder of files `CLIENT-*.json`, each a list of requests with `method`,
`path`, `headers` and `body`; long texts may be left out as `<name:LENGTH>`.
"""

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.api.anthropic import shapes
from tests.api.requests import prompt_of
from tests.api.responses import codex
from tests.environment import option

FOLDER = option("CAPTURES")
CLIENTS = ("claude-code", "codex", "opencode", "aider", "sdks")
LEFT_OUT = re.compile(r"<(?P<name>[a-z_]+):(?P<length>\d+)B?>(?P<rest>.*)", re.DOTALL)
NOTHING_KEPT = "<...>"
SCHEMAS = ("input_schema", "parameters")
WORDS = ("the", "a", "of", "to", "and", "in", "is", "you", "that", "it", "for", "was", "on", "are")


class Request(Struct, frozen=True):
    """One request of a client."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Tape(Struct, frozen=True):
    """Requests in their order; no `requests` where nothing was recorded, or not here."""

    name: str
    requests: tuple[Request, ...] = ()


@functools.cache
def tapes() -> tuple[Tape, ...]:
    """Those with words of ours, and the recorded ones, or one without requests in their place."""
    own = (_claude(), _claude_search(), _codex(), _opencode(), _aider(), _continue())
    files = sorted(Path(FOLDER).glob("*.json")) if FOLDER else []
    of_clients = [file for file in files if file.stem.startswith(CLIENTS)]
    missing = (
        client for client in CLIENTS if not any(file.stem.startswith(client) for file in of_clients)
    )
    return (*own, *map(recorded, of_clients), *(Tape(f"{client}-recorded") for client in missing))


def recorded(file: Path) -> Tape:
    """Requests of a file, with words of ours for the texts that were left out."""
    requests = tuple(
        Request(
            exchange["method"],
            exchange["path"],
            exchange["headers"],
            _inflated(exchange["body"], file.stem),
        )
        for exchange in json.loads(file.read_text())
    )
    return Tape(file.stem, requests)


def _inflated(value: Any, owner: str, key: str = "") -> Any:
    """Texts that were left out, as words of our own of about the same length."""
    match value:
        case {"type": "namespace", "tools": [str(), *_] as names, **rest}:
            tools = [codex.function(tool) for tool in names]
            return {"description": "", **rest, "type": "namespace", "tools": tools}
        case dict():
            owner += str(value.get("name", ""))
            return {name: _inflated(member, owner, name) for name, member in value.items()}
        case list():
            return [_inflated(member, owner) for member in value]
        case str() if value == NOTHING_KEPT:
            return _filler(600, owner + key, is_schema=key in SCHEMAS)
        case str() if left := LEFT_OUT.fullmatch(value):
            seed = left["rest"] + owner + left["length"]
            return _filler(int(left["length"]), seed, is_schema=key in SCHEMAS)
    return value


def _filler(n_chars: int, seed: str, *, is_schema: bool) -> Any:
    """The same words for the same place, others for another."""
    chance = random.Random(seed)
    text = " ".join(chance.choices(WORDS, k=n_chars // 3))[:n_chars]
    if not is_schema:
        return text
    return {"type": "object", "properties": {"a": {"type": "string", "description": text}}}


def _sent(path: str, headers: dict[str, str], *bodies: Any) -> tuple[Request, ...]:
    return tuple(Request("POST", path, headers, body) for body in bodies)


def _claude() -> Tape:
    """A title in between, a tool, and the next question."""
    first = shapes.opening("run the marker command")
    result = shapes.result("CAPTURED_OK", is_error=False)
    second = shapes.following(first, shapes.canned("ToolA", command="echo"), result)
    question = {"type": "text", "text": "a second different prompt"}
    third = shapes.following(second, [{"type": "text", "text": "Done."}], question)
    headers = {"x-claude-code-session-id": shapes.SESSION}
    title = shapes.title("<session>run the marker command</session>")
    return Tape(
        "claude-code", _sent("/v1/messages?beta=true", headers, first, title, second, third)
    )


def _claude_search() -> Tape:
    """A search finds tools, which then stand in the middle of the list."""
    first = shapes.opening("find a tool")
    later = shapes.found_later()
    result = shapes.result(
        [{"type": "tool_reference", "tool_name": tool["name"]} for tool in later]
    )
    grown = sorted([*first["tools"], *later], key=lambda tool: str(tool["name"]))
    second = shapes.following(first, shapes.canned("ToolC", query="web"), result, tools=grown)
    return Tape("claude-code-toolsearch", _sent("/v1/messages?beta=true", {}, first, second))


def _codex() -> Tape:
    bodies = [codex.request(), codex.request(*codex.LOOP)]
    for body in bodies:
        body["input"][0] = codex.said("developer", prompt_of(900, 3))
    return Tape("codex", _sent("/v1/responses", codex.HEADERS, *bodies))


def _opencode() -> Tape:
    """The title of its own request, and a tool loop that echoes the thoughts."""
    whole: dict[str, Any] = {
        "model": "local-model",
        "max_tokens": 8192,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tools = [_function(name, number) for number, name in enumerate(("bash", "edit", "glob"))]
    asked = {"role": "user", "content": '"run the marker command"'}
    head = [{"role": "system", "content": prompt_of(500, 5)}, asked]
    title = [{"role": "system", "content": prompt_of(120, 6)}, asked]
    call = {"name": "bash", "arguments": '{"command":"echo OK","description":"prints"}'}
    answered = {
        "role": "assistant",
        "content": "I run it.",
        "reasoning_content": "let me think",
        "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "CAPTURED_OK\n"}
    bodies = [
        {**whole, "messages": title},
        {**whole, "messages": head, "tools": tools, "tool_choice": "auto"},
        {**whole, "messages": [*head, answered, result], "tools": tools, "tool_choice": "auto"},
    ]
    return Tape("opencode", _sent("/v1/chat/completions", {"x-session-id": "ses_1"}, *bodies))


def _aider() -> Tape:
    """The files move to the end with every turn, so that only what is before them stays."""
    head = [
        {"role": "system", "content": prompt_of(500, 7)},
        {"role": "user", "content": prompt_of(60, 8)},
        {"role": "assistant", "content": "Ok, I won't try and edit those files."},
    ]
    files = [
        {"role": "user", "content": f"I have *added these files*\n{prompt_of(80, 9)}"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
    ]
    asked = {"role": "user", "content": "make hello return 2"}
    turns = [asked, {"role": "assistant", "content": "hello.py\n```\nreturn 2\n```"}]
    settled = [{"role": "user", "content": "I updated the files."}]
    settled.append({"role": "assistant", "content": "Ok."})
    ask = {"role": "user", "content": "now fix the errors"}
    whole = {"model": "local-model", "stream": True, "temperature": 0}
    bodies = [
        {**whole, "messages": [*head, *files, asked]},
        {**whole, "messages": [*head, *turns, *settled, *files, ask]},
    ]
    return Tape("aider", _sent("/v1/chat/completions", {}, *bodies))


def _continue() -> Tape:
    """A tool loop of its CLI, and the next question; it sends the same to `provider: ollama`."""
    asked = {"role": "user", "content": "run the marker command"}
    arguments = '{"command":"echo OK"}'
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "Bash", "arguments": arguments},
    }
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "CAPTURED_OK\n", "tool_call_id": "call_1"}
    done = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "and now?"}]
    whole: dict[str, Any] = {
        "model": "local-model",
        "stream": True,
        "tools": [_function(name, number) for number, name in enumerate(("Read", "Bash", "Edit"))],
        "max_tokens": 64,
        "stream_options": {"include_usage": True},
    }
    first = [{"role": "system", "content": prompt_of(500, 10)}, asked]
    second = [*first, called, result]
    bodies = [{**whole, "messages": messages} for messages in (first, second, [*second, *done])]
    headers = {"user-agent": "ls/JS 5.23.2", "x-stainless-lang": "js"}
    return Tape("continue-tool-loop", _sent("/v1/chat/completions", headers, *bodies))


def _function(name: str, seed: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    function = {"name": name, "description": prompt_of(60, seed), "parameters": parameters}
    return {"type": "function", "function": function}
