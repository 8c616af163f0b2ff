"""An answer with a grammar has no thought where thinking is off, in every dialect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.running import running
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WANTED = {"type": "json_schema", "schema": SCHEMA}
NAMED = {"type": "json_schema", "name": "it", "schema": SCHEMA}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "which city is the capital of France? think"}],
    "max_tokens": 6,
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The embedded model, which likes to think; its preset switches thinking off."""
    preset = Preset(
        model=ModelSpec(id="demo"),
        name="demo",
        slots=SlotSpec(count=1, n_ctx=1024),
        server=ServerSpec(port=0),
        sampling=SamplingSpec(temperature=0, thinking=False),
    )
    home: Path = tmp_path_factory.mktemp("home")
    with (
        running(preset, home) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_chat_completions_begin_with_the_grammar(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    made = post(http, "/v1/chat/completions", {**CHAT, "response_format": wanted})
    assert made["choices"][0]["message"]["content"].startswith("{")


def test_responses_begin_with_the_grammar(http: httpx.Client) -> None:
    body = {"input": CHAT["messages"][0]["content"], "max_output_tokens": 6}
    made = post(http, "/v1/responses", {**body, "text": {"format": NAMED}})
    (item,) = made["output"]
    assert item["content"][0]["text"].startswith("{")


def test_messages_begin_with_the_grammar(http: httpx.Client) -> None:
    made = post(http, "/v1/messages", {**CHAT, "output_config": {"format": WANTED}})
    (block,) = made["content"]
    assert block["text"].startswith("{")


def test_a_request_that_wants_to_think_still_may(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    body = {**CHAT, "response_format": wanted, "max_tokens": 400, **thinking}
    message = post(http, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"].startswith("{")
