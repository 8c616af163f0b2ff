"""Every body and every chunk of the OpenAI door, strictly against the SDK's own types."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel

from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body, chunks
from tests.api.running import Running, serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
LEGACY = "/v1/completions"
CALL = '<tool_call>\n{"name": "act", "arguments": {"a": [1, null, {"b": "c"}]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "act", "parameters": {"type": "object"}}}]
LEGACY_BODY: dict[str, Any] = {"prompt": "once", "max_tokens": 4, "temperature": 0}


def strictly(kind: type[BaseModel], sent: Any) -> None:
    kind.model_validate_json(json.dumps(sent), strict=True)


@pytest.fixture(scope="module")
def caller() -> Iterator[Running]:
    """Always thinks, speaks and calls."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    said = f"Hm.\n</think>\n\nI act.\n{CALL}\n{CALL}"
    engine.script = engine.tokenizer.encode(said, add_special_tokens=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as live:
        yield live


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "temperature": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"return_progress": True, "timings_per_token": True},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_chat(http: httpx.Client, more: dict[str, Any]) -> None:
    body = chat_body(**more)
    strictly(ChatCompletion, http.post(CHAT, json=body).raise_for_status().json())
    for chunk in chunks(http, CHAT, body):
        strictly(ChatCompletionChunk, chunk)


def test_chat_with_thoughts_and_calls(caller: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "act"}],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    with httpx.Client(base_url=caller.url, timeout=PATIENCE_S) as http:
        whole = http.post(CHAT, json=body).json()
        found = chunks(http, CHAT, body)
    strictly(ChatCompletion, whole)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 2
    assert whole["choices"][0]["message"]["reasoning_content"]
    for chunk in found:
        strictly(ChatCompletionChunk, chunk)


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"n": 2}, {"stream_options": {"include_usage": True}}]
)
def test_completions(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {**LEGACY_BODY, **more}
    strictly(Completion, http.post(LEGACY, json=body).raise_for_status().json())
    for chunk in chunks(http, LEGACY, body):
        choices = chunk["choices"]
        for choice in choices:  # the SDK's type knows no null, its own streams are full of them
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, chunk)


def test_models(http: httpx.Client) -> None:
    for model in http.get("/v1/models").json()["data"]:
        strictly(Model, model)
        strictly(Model, http.get(f"/v1/models/{model['id']}").json())


def test_input_tokens(http: httpx.Client) -> None:
    counted = http.post("/v1/responses/input_tokens", json={"input": "hi"}).json()
    strictly(InputTokenCountResponse, counted)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", CHAT, 400),
        ("POST", LEGACY, 400),
        ("POST", "/v1/responses", 400),
        ("POST", "/v1/embeddings", 400),
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1/responses/resp_1", 404),
        ("DELETE", CHAT, 405),
    ],
)
def test_errors(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path, json={})
    assert answer.status_code == status
    strictly(ErrorObject, answer.json()["error"])
    assert answer.headers["x-request-id"].startswith("req_")
