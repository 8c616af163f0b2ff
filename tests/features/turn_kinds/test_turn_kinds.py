"""Kinds of turns by the headers and bodies of real clients."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxstack.api.caller import MARKS
from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_messages
from mlxstack.api.dialects.anthropic.to_conversation import response_format
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_chat
from mlxstack.core.request import TurnKind, TurnReading
from mlxstack.features.turn_kinds.policy import HELPER, ROWS, SCRIPT, SUBAGENT, SUMMARY, read_turn
from tests.api.anthropic import shapes
from tests.environment import option

FOLDER = option("CAPTURES")
SCHEMAS = ("parameters", "input_schema")
LEFT_OUT = re.compile(r"<str:\d+> ?")
CLAUDE = {"user-agent": "claude-cli/2.1.329 (external, cli)"}
SUMMARY_OF_PI = "You are a context summarization assistant. Your task is to read a conversation"
COMMIT = (
    "You are an expert software engineer that generates concise, one-line Git commit messages based"
)

BODIES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "quota probe of Claude Code": (
        CLAUDE,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]},
    ),
    "title of Claude Code": (CLAUDE, shapes.title("<session>run the marker command</session>")),
    "title of opencode": (
        {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "ses_1"},
        {"messages": [{"role": "system", "content": "You are a title generator. Be short."}]},
    ),
    "summary of opencode": (
        {},
        {
            "messages": [
                {"role": "system", "content": "Summarize what was done in this conversation. Be"}
            ]
        },
    ),
    "title of qwen-code": (
        {},
        {
            "messages": [
                {
                    "role": "system",
                    "content": "Generate a concise, sentence-case title (3-7 words) that captures "
                    "what this programming-assistant session is about. Be short.",
                }
            ]
        },
    ),
    "title of Continue": (
        {},
        {
            "messages": [
                {"role": "user", "content": "Given the following... please reply with a title for"}
            ]
        },
    ),
    "summary of pi": ({}, {"messages": [{"role": "system", "content": SUMMARY_OF_PI}]}),
    "commit message of aider": ({}, {"messages": [{"role": "system", "content": COMMIT}]}),
    "summary of aider": (
        {},
        {
            "messages": [
                {
                    "role": "system",
                    "content": "*Briefly* summarize this partial conversation about programming.",
                }
            ]
        },
    ),
    "sub-agent of Claude Code": (
        {**CLAUDE, "x-claude-code-agent-id": "a4bb6d3fef88bc051"},
        shapes.subagent("look around"),
    ),
    "sub-agent of opencode": ({"x-parent-session-id": "ses_1", "x-session-id": "ses_2"}, {}),
    "sub-agent of Codex": ({"x-openai-subagent": "collab_spawn"}, {}),
    "Claude Code in a script": (
        {"user-agent": "claude-cli/2.1.329 (external, sdk-cli)"},
        shapes.opening("run the marker command"),
    ),
    "Codex in a script": ({"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64)"}, {}),
}
"""Headers and bodies by row: in the shape of the client's, with words of ours."""


def unmarked(value: Any) -> Any:
    """Without the marks of texts that were left out."""
    match value:
        case dict():
            return {
                name: {} if name in SCHEMAS else unmarked(member) for name, member in value.items()
            }
        case list():
            return [unmarked(member) for member in value]
        case str():
            return LEFT_OUT.sub("", value, count=1)
    return value


def reading(headers: dict[str, str], body: dict[str, Any]) -> TurnReading | None:
    """Reading as admission asks for it."""
    marks = {name.lower(): value for name, value in headers.items() if name.lower() in MARKS}
    names: tuple[str, ...] = ()
    if "input" in body or not body.get("messages"):
        return read_turn(marks, None, body.get("max_tokens"), names)
    if "system" in body or headers.get("user-agent", "").startswith("claude"):
        parsed = msgspec.convert({"max_tokens": 9, **body}, MessagesBody)
        form = response_format(parsed)
        names = tuple(form.schema["properties"]) if form and form.schema else ()
        return read_turn(marks, from_messages(parsed), parsed.max_tokens, names)
    parsed_chat = msgspec.convert(body, ChatBody)
    return read_turn(marks, from_chat(parsed_chat), parsed_chat.max_tokens, names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_is_the_reading_of_its_client(row: Any) -> None:
    assert reading(*BODIES[row.name]) == row.reading


def test_each_row_has_a_body_and_headers_that_are_read() -> None:
    assert [row.name for row in ROWS] == list(BODIES)
    assert {row.header for row in ROWS} <= {*MARKS, ""}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({}, {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}),
        (CLAUDE, shapes.opening("quota")),
        (CLAUDE, {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}),
        (CLAUDE, {**shapes.title("a"), "tools": shapes.tools(1, 8)}),
        ({"x-openai-subagent": "review"}, {}),
        ({"x-openai-subagent": "compact"}, {}),
        ({"user-agent": "codex-tui/0.169.0 (Debian 12.0.0; x86_64)"}, {}),
        ({"x-session-id": "ses_1"}, {"messages": [{"role": "user", "content": "a title"}]}),
    ],
)
def test_all_else_is_a_persons(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert reading(headers, body) is None


def test_a_title_of_a_script_is_a_title() -> None:
    headers, body = BODIES["title of Claude Code"]
    script, _ = BODIES["Claude Code in a script"]
    assert reading({**headers, **script}, body) == HELPER
    assert reading(script, {"max_tokens": 1}) == SCRIPT


def recorded() -> list[tuple[str, dict[str, Any]]]:
    files = sorted(Path(FOLDER).glob("*.json")) if FOLDER else []
    return [
        (file.stem, entry) for file in files for entry in msgspec.json.decode(file.read_bytes())
    ]


EXPECTED: dict[str, set[TurnReading | None]] = {
    "aider": {None},
    "claude-code-2.1.329-subagent": {SCRIPT, SUBAGENT},
    "claude-code-2.1.329-tool-loop-and-continue": {SCRIPT},
    "codex-0.169-tool-loop": {SCRIPT},
    "opencode-1.18-tool-loop": {HELPER, None},
    "opencode-1.18-reasoning": {HELPER, None},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_requests_have_the_kinds_of_their_clients(name: str) -> None:
    entries = [entry for stem, entry in recorded() if stem == name]
    if not entries:
        pytest.skip("MLX_STACK_CAPTURES names no folder with recordings of this client")
    found = []
    for entry in entries:
        body = entry["body"]
        body = json.loads(body) if isinstance(body, str) else body or {}
        if "count_tokens" not in entry["path"] and entry["method"] == "POST":
            found.append(reading(entry["headers"], unmarked(body)))
    assert set(found) == EXPECTED[name]
    assert SUMMARY not in found
    n_marked = sum("x-claude-code-agent-id" in entry["headers"] for entry in entries)
    kinds = [one.kind for one in found if one is not None]
    assert kinds.count(TurnKind.SUBAGENT) == n_marked
