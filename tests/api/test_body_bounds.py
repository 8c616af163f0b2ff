"""What a body lists has a largest number and size: a 400 that says both, and no fault."""

import importlib
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mlxstack.api.request_fields import (
    MAX_BIASES,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
)
from tests.fuzz.doors import house

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
TEXTS = "/v1/completions"


def refusal(path: str, **more: Any) -> str | None:
    """The words of a 400; None for an answer."""
    said = {"prompt": "hello"} if path == TEXTS else {"messages": HELLO}
    body = json.dumps({**said, "max_tokens": 4, **more}).encode()
    answer = house().post(path, body, "aaaa")
    assert answer.status_code in {200, 400}, answer.text
    if answer.status_code == 200:
        return None
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "stop"), (TEXTS, "stop"), (MESSAGES, "stop_sequences")]
)
def test_stop_words_are_bounded(path: str, name: str) -> None:
    many = [f"stop{n}" for n in range(MAX_STOPS)]
    assert refusal(path, **{name: [*many, ""]}) is None
    assert f"{name}: at most {MAX_STOPS} sequences, got {MAX_STOPS + 1}" in str(
        refusal(path, **{name: [*many, "one"]})
    )
    assert refusal(path, **{name: ["a" * MAX_STOP]}) is None
    assert f"{MAX_STOP} characters per sequence, got {MAX_STOP + 1}" in str(
        refusal(path, **{name: ["a" * 1001]})
    )


def test_biases_are_bounded() -> None:
    assert refusal(CHAT, logit_bias=[[1, 1]] * 1000) is None
    text = refusal(CHAT, logit_bias=[[1, 1]] * (MAX_BIASES + 1))
    assert text == f"logit_bias: at most {MAX_BIASES} entries, got {MAX_BIASES + 1}"


@pytest.mark.parametrize(
    "value", [10**400, "nan", "inf", "-inf", None, "a" * 9999], ids=lambda value: repr(value)[:9]
)
def test_a_bias_is_a_finite_number(value: object) -> None:
    text = str(refusal(CHAT, logit_bias=[[1, value]]))
    assert "finite number" in text
    assert len(text) < 200


def test_a_bias_of_false_forbids() -> None:
    assert refusal(CHAT, logit_bias=[[1, False]]) is None
    assert house().engine.asked[-1].sampling.logit_bias[0] == (1, float("-inf"))


def test_messages_calls_and_tools_are_bounded() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "a"}}
    many = {
        "20000 messages, got 20001": {"messages": HELLO * (MAX_MESSAGES + 1)},
        "20000 tool calls, got 20001": {
            "messages": [*HELLO, {"role": "assistant", "tool_calls": [call] * (MAX_CALLS + 1)}]
        },
        "100000 parts of contents, got 100001": {
            "messages": [{"role": "user", "content": [{"type": "text"}] * (MAX_PARTS + 1)}]
        },
        "4000 tools, got 4001": {"tools": [tool] * (MAX_TOOLS + 1)},
    }
    for text, more in many.items():
        assert f"at most {text}" in str(refusal(CHAT, **more))
    assert "at most 20000 messages, got 20001" in str(
        refusal(MESSAGES, messages=HELLO * (MAX_MESSAGES + 1))
    )
    blocks = [{"type": "text", "text": ""}] * (MAX_PARTS + 1)
    said = [{"role": "user", "content": blocks}]
    assert "at most 100000 content blocks, got 100001" in str(refusal(MESSAGES, messages=said))
    assert "at most 4000 tools, got 4001" in str(
        refusal(MESSAGES, tools=[{"name": "a"}] * (MAX_TOOLS + 1))
    )
    assert "at most 40000 items, got 40001" in str(refusal("/v1/responses", input=HELLO * 40_001))


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompts_of_one_body_fit_in_the_queue(is_stream: bool) -> None:
    assert refusal(TEXTS, prompt=["hi"] * 64, stream=is_stream) is None
    assert house().engine.asked
    text = refusal(TEXTS, prompt=["hi"] * 33, n=2, stream=is_stream)
    assert "33 prompts with 2 choices each are 66 answers; one request may ask for 64" in str(text)
    assert not house().engine.asked


def test_a_body_has_64_mib_at_most_by_default() -> None:
    for n_bytes, status in ((2**26, 400), (2**26 + 1, 413)):
        assert house().post(CHAT, b" " * n_bytes, "aaaa").status_code == status


@pytest.mark.parametrize(
    ("path", "module"),
    [
        (CHAT, "openai_responses.chat_routes"),
        (MESSAGES, "anthropic.routes"),
        ("/v1/responses", "openai_responses.routes"),
    ],
)
def test_a_body_is_converted_beside_the_loop(
    path: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(convert: Callable[..., Any]) -> Callable[..., Any]:
        def post(*given: Any, **more: Any) -> Any:
            threads.append(threading.current_thread())
            return convert(*given, **more)

        return post

    routes = importlib.import_module(f"mlxstack.api.dialects.{module}")
    owner = getattr(routes, "to_conversation", routes)
    monkeypatch.setattr(owner, "conversation", noted(owner.conversation))
    assert refusal(path, **({"input": HELLO} if path == "/v1/responses" else {})) is None
    assert threads and threading.current_thread() not in threads
