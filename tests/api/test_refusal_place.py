"""Message and place of a refusal are of one fault, also where a body has two."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from tests.api.running import Running
from tests.gateway.gateway_thread import standing_behind
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

Faults = dict[str, Any]
"""Wrong values by their paths."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "act", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "act", "parameters": SCHEMA}
SAMPLING: Faults = {
    "temperature": "hot", "top_p": 3, "min_p": -1, "seed": "x", "stop": [5], "stream": "yes",
    "logit_bias": {"": 1}, "repeat_penalty": 0, "presence_penalty": [], "id_slot": 99,
    "session_id": "a/b", "thinking_budget_tokens": "x", "cache_prompt": 1,
    "structured_outputs": {"json": 5}, "guided_choice": "x",
}  # fmt: skip
CHAT_MESSAGES: list[Any] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": [{"type": "text", "text": "One"}]},
    {"role": "assistant", "content": "Two", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "act", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "Three"},
    {"role": "user", "content": [{"type": "text", "text": "Four"}]},
]  # fmt: skip
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

CHAT: dict[str, Any] = {"messages": CHAT_MESSAGES, "tools": [FUNCTION, FUNCTION | {"x": 1}]}
CHAT_FAULTS: Faults = {
    **SAMPLING,
    "max_tokens": 0,
    "n": 99,
    "top_logprobs": 30,
    "messages[0].role": "alien",
    "messages[1].content[0].type": 5,
    "messages[2].tool_calls[0].function": 5,
    "messages[3].content": 5,
    "messages[4].content": [IMAGE],
    "tools[0]": {"type": "function"},
    "tools[1]": {"type": "custom"},
    "tools[1].function.name": 5,
    "tool_choice": "maybe",
    "response_format": {"type": "xml"},
    "reasoning_effort": 5,
    "chat_template_kwargs": {"enable_thinking": "no"},
    "prediction": {"type": "x"},
}
CALL = {"type": "function_call", "call_id": "c", "name": "act", "arguments": "{}"}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "Two"},
        {"type": "item_reference", "id": "rs_gone"},
        {"role": "user", "content": [{"type": "input_text", "text": "Three"}]},
    ],
    "tools": [FLAT, FLAT | {"name": "other"}],
}
RESPONSES_FAULTS: Faults = {
    **SAMPLING,
    "max_output_tokens": 0,
    "top_logprobs": 30,
    "previous_response_id": "resp_1",
    "input[0].role": "alien",
    "input[1].content[0].type": 5,
    "input[1].type": "program",
    "input[2].name": None,
    "input[2].call_id": 5,
    "input[3]": {"type": "input_text"},
    "input[4].type": "summary_text",
    "input[5].content": [{"type": "input_file"}],
    "tools[0].name": "",
    "tools[1].description": 5,
    "tool_choice": "maybe",
    "text": {"format": {"type": "xml"}},
    "text.format": {"type": "json_schema", "schema": 5},
    "instructions": [{"type": "input_text"}],
    "reasoning": 5,
    "include": [5],
}
BLOCK = {"type": "text", "text": "One"}
MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [BLOCK],
    "messages": [
        {"role": "user", "content": [BLOCK]},
        {"role": "assistant", "content": [
            BLOCK, {"type": "tool_use", "id": "t", "name": "act", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]}]},
    ],
    "tools": [{"name": "act", "input_schema": SCHEMA}, {"name": "b", "input_schema": SCHEMA}],
}  # fmt: skip
MESSAGES_FAULTS: Faults = {
    **{name: value for name, value in SAMPLING.items() if name != "stop"},
    "max_tokens": -5,
    "stop_sequences": [5],
    "system[0].text": 5,
    "messages[0].role": "alien",
    "messages[0].content[0].text": 5,
    "messages[1].content[1].id": 5,
    "messages[2].content[0].content[0].type": 5,
    "messages[2].content[0].tool_use_id": None,
    "tools[0].name": "",
    "tools[1].input_schema": "x",
    "tool_choice": {"type": "maybe"},
    "thinking": {},
    "output_config": {"format": {"type": "xml"}},
    "output_format": {"type": "xml"},
    "thread": {"type": "create"},
    "compaction": {"type": "summarize"},
}
OLLAMA: dict[str, Any] = {"messages": CHAT_MESSAGES, "tools": [FUNCTION, FUNCTION], "options": {}}
OLLAMA_FAULTS: Faults = {
    "options.temperature": "hot",
    "options.top_p": 3,
    "options.num_predict": "many",
    "messages[0].role": "alien",
    "messages[1].content[0].type": 5,
    "messages[3].tool_call_id": 5,
    "tools[0]": {"type": "function"},
    "tools[1].function.name": 5,
    "format": "xml",
    "think": "deeply",
    "top_logprobs": 30,
    "keep_alive": "later",
}
COMPLETION_FAULTS: Faults = {**SAMPLING, "prompt": [], "max_tokens": 0, "n": 99, "best_of": 5}

BODIES: dict[str, tuple[dict[str, Any], Faults]] = {
    "/v1/chat/completions": (CHAT, CHAT_FAULTS),
    "/v1/responses": (RESPONSES, RESPONSES_FAULTS),
    "/v1/responses/input_tokens": (RESPONSES, RESPONSES_FAULTS),
    "/v1/messages": (MESSAGES, MESSAGES_FAULTS),
    "/v1/messages/count_tokens": (MESSAGES, MESSAGES_FAULTS),
    "/api/chat": (OLLAMA, OLLAMA_FAULTS),
    "/v1/completions": ({"prompt": "One"}, COMPLETION_FAULTS),
    "/completion": ({"prompt": "One"}, {**COMPLETION_FAULTS, "n_probs": "x"}),
}
STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def steps(path: str) -> list[str | int]:
    return [int(index) if index else name for name, index in STEP.findall(path)]


def faulty(body: Any, path: str, value: Any) -> None:
    """Put a wrong value into a body."""
    *parents, last = steps(path)
    for step in parents:
        body = body.setdefault(step, {}) if isinstance(body, dict) else body[step]
    body[last] = value


def told(answer: httpx.Response) -> tuple[str, str]:
    """Message and place of a refusal; Ollama's and Anthropic's have no place but in the message."""
    error = answer.json()["error"]
    if isinstance(error, str):
        return error, ""
    return error["message"], error.get("param") or ""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("service")
    with standing_behind("service", ServerSpec(port=0), folder) as (found, _):
        yield found


@pytest.fixture
def http(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
        yield client


def refusal(http: httpx.Client, path: str, body: Any, *places: str) -> tuple[str, str] | None:
    """Message and place; None where the faults are none for this path."""
    # A copy whose equal parts are different objects.
    sent = json.loads(json.dumps(body))
    for place in places:
        faulty(sent, place, BODIES[path][1][place])
    answer = http.post(path, json={**sent, "model": "m"})
    assert answer.status_code in {200, 400}, (places, answer.text)
    return told(answer) if answer.status_code == 400 else None


@pytest.mark.parametrize("path", BODIES)
def test_two_faults_have_the_refusal_of_one(http: httpx.Client, path: str) -> None:
    body, faults = BODIES[path]
    assert refusal(http, path, body) is None
    alone = {place: refusal(http, path, body, place) for place in faults}
    assert sum(one is not None for one in alone.values()) > len(faults) // 2
    for one, other in combinations(faults, 2):
        if one.startswith(other) or other.startswith(one):
            continue
        both = refusal(http, path, body, one, other)
        if both is None:
            assert alone[one] is None and alone[other] is None
        else:
            assert both in (alone[one], alone[other]), (one, other)


@pytest.mark.parametrize("path", BODIES)
def test_the_place_is_where_the_fault_is(http: httpx.Client, path: str) -> None:
    body, faults = BODIES[path]
    for place in faults:
        found = refusal(http, path, body, place)
        if found is None:
            continue
        message, param = found
        known = param or re.split(r"[:\s]", message)[0]
        near = known == place or known.startswith((f"{place}.", f"{place}["))
        assert near or place.startswith((f"{known}.", f"{known}[")), (place, found)
        # A message that begins with a path begins with this one.
        first = message.partition(": ")[0]
        if param and re.fullmatch(r"[\w.\[\]]+", first):
            assert first == param, (place, found)
