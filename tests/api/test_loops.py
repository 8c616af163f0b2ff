"""Answers that repeat themselves end in every dialect, and say why."""

from typing import Any

import httpx
import pytest

from mlxstack.api.dialects.anthropic.stream import stop_reason
from mlxstack.api.dialects.openai_chat.stream import finish_reason
from mlxstack.core.engine_events import FinishReason, RequestTimings
from mlxstack.core.response_parts import GenerationFinished
from mlxstack.features.loops import policy
from tests.api.requests import PLAIN, chat_body, chunks
from tests.features.loops.sooner import MAX_SHORT, end_sooner

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LOOPING = {"temperature": 0, "logit_bias": {"40": 1e6}, "max_tokens": 600}
STOPPED = {"at": 0, "period": 1, "n_tokens": MAX_SHORT, "is_thought": False}
HEADER = f"answer: 1 tokens, {MAX_SHORT}.0 times from token 0 on"
SAID: list[Any] = [{"role": "user", "content": "say it"}]


@pytest.fixture
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    end_sooner(monkeypatch)


@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize(
    ("path", "body", "reason", "loops"),
    [
        ("/v1/chat/completions", {**chat_body(), **LOOPING},
         ("choices", 0, "finish_reason", "stop"), ("usage", "loops")),
        ("/v1/completions", {"prompt": "once", **LOOPING},
         ("choices", 0, "finish_reason", "stop"), ("usage", "loops")),
        ("/v1/responses", {"input": "say it", **LOOPING, "reasoning": {"effort": "none"}},
         ("status", "completed"), ("usage", "loops")),
        ("/v1/messages", {"messages": SAID, **LOOPING, "thinking": {"type": "disabled"}},
         ("stop_reason", "end_turn"), ("usage", "loops")),
        ("/completion", {"prompt": "once", **LOOPING},
         ("stop_type", "limit"), ("loops",)),
        ("/api/chat", {"messages": SAID, "stream": False, "think": False,
                       "options": {**LOOPING, "num_predict": 600}},
         ("done_reason", "stop"), ("loops",)),
    ],
)  # fmt: skip
def test_every_dialect_ends_the_answer(
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    reason: tuple[Any, ...],
    loops: tuple[str, ...],
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    field = answer.json()
    for key in reason[:-1]:
        field = field[key]
    assert field == reason[-1]
    stopped = answer.json()
    for key in loops:
        stopped = stopped[key]
    assert stopped == [STOPPED]
    timings = answer.json().get("timings", {})
    assert all(isinstance(value, int | float) for value in timings.values()), "as in llama-server"
    assert answer.headers["x-mlx-stack-loops"] == HEADER


def test_the_last_event_of_a_stream_and_the_request_log_say_it(http: httpx.Client) -> None:
    """After as many tokens as for a user."""
    stopped = {**STOPPED, "n_tokens": policy.MAX_SHORT}
    body = {**chat_body(), **LOOPING, "stream_options": {"include_usage": True}}
    events = chunks(http, "/v1/chat/completions", body)
    assert events[-1]["usage"]["loops"] == [stopped]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    (logged,) = http.get("/requests", params={"limit": 1}).json()[:1]
    assert logged["ended"] == "loop"
    assert logged["loops"] == [stopped]


@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize(
    "more", [{"stop_loops": False}, {"stop_loops": "off"}, {"ignore_eos": True}]
)
def test_a_client_may_have_the_whole_of_it(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {**chat_body(), **LOOPING, "max_tokens": MAX_SHORT + 20, **more}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == MAX_SHORT + 20


def test_a_call_that_a_loop_cut_ends_as_at_a_limit() -> None:
    cut = GenerationFinished(FinishReason.LOOP, RequestTimings(), 0, has_cut_call=True)
    assert finish_reason(cut, has_calls=False) == "length"
    assert stop_reason(cut, has_calls=False)["stop_reason"] == "max_tokens"
    whole = GenerationFinished(FinishReason.LOOP, RequestTimings(), 0)
    assert finish_reason(whole, has_calls=False) == "stop"


def test_a_call_that_repeats_is_named(http: httpx.Client) -> None:
    call = {"name": "read_file", "arguments": '{"path": "a.py"}'}
    messages = SAID.copy()
    for i in range(3):
        called = {"id": f"call_{i}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": "x = 1"})
    body = {"messages": messages, "max_tokens": 1, **PLAIN}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-mlx-stack-repeated-call"] == "read_file, 3 times with the same result"
    (logged,) = http.get("/requests", params={"limit": 1}).json()[:1]
    assert logged["repeated_call"] == {"name": "read_file", "n_times": 3}
    body["messages"] = messages[:-2]
    answer = http.post("/v1/chat/completions", json=body)
    assert "x-mlx-stack-repeated-call" not in answer.headers
