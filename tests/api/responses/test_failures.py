"""Streams that are slow, cut or broken: a client always learns, the service stays well."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxstack.api import streaming
from mlxstack.api.dialects.openai_responses.response_schema import Response
from mlxstack.api.dialects.openai_responses.stream import ResponseStream
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.api.errors import to_stack_error
from mlxstack.core.engine_events import FinishReason, RequestTimings
from mlxstack.core.errors import BadRequest, Broken, Busy, Loading, OutOfMemory, StackError, TooLong
from mlxstack.core.preset import ServerSpec
from mlxstack.core.response_parts import (
    ContentPart,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    ToolCallStarted,
)
from tests.api.responses.checking import KINDS, check
from tests.api.responses.conftest import Scripted
from tests.api.running import Running, serving, standing
from tests.patience import PATIENCE_S, wait_until
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

BEGUN = Response(
    id="resp_1", created_at=1, model="m", temperature=0, top_p=1, reasoning={}, text={},
    metadata={},
)  # fmt: skip
CALL = ToolCallStarted("call_1", "act")
BODY: dict[str, Any] = {"input": "hi", "stream": True}


@pytest.fixture
def hanging() -> Iterator[tuple[Running, StandIn]]:
    """A service whose engine takes a seat and never says a word."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = None
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as live:
        yield live, engine


def text_until(live: Running, expected: str) -> Iterator[str]:
    """The stream up to these words, then whatever follows."""
    with httpx.stream("POST", f"{live.url}/v1/responses", json=BODY, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        text = ""
        for piece in answer.iter_text():
            text += piece
            if expected in text:
                yield text
        yield text


def test_x20_x21_the_heartbeat_is_an_event(
    hanging: tuple[Running, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment would not keep Codex from hanging up."""
    monkeypatch.setattr("mlxstack.api.run_generation.BEAT_S", 0.05)
    live, engine = hanging
    for text in text_until(live, '"sequence_number":4'):
        assert text.count("event: response.in_progress") >= 4
        assert ": keepalive" not in text
        break
    assert streaming.BEAT_S == 10.0
    wait_until(lambda: engine.cancelled)
    assert engine.cancelled == [engine.asked[0].id], "leaving the stream cancels the ask"


@pytest.mark.parametrize("part", [ContentPart("Hel"), ReasoningPart("Hm"), CALL])
def test_a_heartbeat_has_the_open_item(scripted: Scripted, part: ResponsePart) -> None:
    """openai-node goes on from the output of such an event."""
    processor = scripted.live.service.text_processor
    telling = ResponseStream(BEGUN, ToolNames(), processor, lambda _: None, is_sealed=False)
    ended = GenerationFinished(FinishReason.LENGTH, RequestTimings(), -1)
    sent = [*telling.opening()]
    for one in (ContentPart("A"), part, KeepAlive(1, 1), ended):
        sent += telling.render(0, one)
    found = check(b"".join(sent).decode())
    beat = found.of("in_progress")[-1]["response"]
    assert len(beat["output"]) == len(found.response["output"])
    assert beat["output"][-1]["status"] == "in_progress"


def test_a_failure_inside_a_stream_is_response_failed(hanging: tuple[Running, StandIn]) -> None:
    live, engine = hanging
    texts = text_until(live, "event: response.in_progress")
    next(texts)
    engine.is_dead = True
    found = check(list(texts)[-1])
    assert found.events[-1]["type"] == "response.failed"
    assert found.response["status"] == "failed"
    assert found.response["error"]["code"] == "server_error"
    assert "engine" in found.response["error"]["message"]


def test_the_sdk_hears_of_a_failure(hanging: tuple[Running, StandIn]) -> None:
    live, engine = hanging
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as sdk:
        kinds = []
        for event in sdk.responses.create(model="m", input="hi", stream=True):
            kinds.append(event.type)
            engine.is_dead = True
    assert kinds[-1] == "response.failed"


@pytest.mark.parametrize(
    ("problem", "code", "expected"),
    [
        (Busy("the queue is full", 1.5), "rate_limit_exceeded", "try again in 1.5s"),
        (OutOfMemory("no room", 3), "rate_limit_exceeded", "try again in 3s"),
        (Loading("stopping"), "rate_limit_exceeded", "try again in 2s"),
        (TooLong(9, 8), "context_length_exceeded", "9 tokens"),
        (BadRequest("no"), "invalid_prompt", "no"),
        (Broken("the engine died"), "server_error", "the engine died"),
        (RuntimeError("secret"), "server_error", "RuntimeError"),
    ],
)
def test_failures_make_codex_wait_or_give_up(
    scripted: Scripted, problem: StackError, code: str, expected: str
) -> None:
    processor = scripted.live.service.text_processor
    telling = ResponseStream(BEGUN, ToolNames(), processor, lambda _: None, is_sealed=False)
    opened = list(telling.opening())
    name, _, data = telling.failure(to_stack_error(problem)).partition(b"\n")
    assert name == b"event: response.failed"
    last = data.removeprefix(b"data: ")
    assert json.loads(last)["sequence_number"] == len(opened)
    assert telling.response.error is not None
    assert telling.response.error.code == code
    assert expected in telling.response.error.message
    assert "secret" not in telling.response.error.message
    if code != "context_length_exceeded":  # OpenAI itself only has it outside of streams
        KINDS["response.failed"].model_validate_json(last, strict=True)


def test_e18_a_full_queue_is_503_before_the_stream(scripted: Scripted) -> None:
    scripted.engine.is_full = True
    try:
        answer = scripted.http.post("/v1/responses", json=BODY)
    finally:
        scripted.engine.is_full = False
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"


def test_x9_a_cut_stream_leaves_the_service_well(scripted: Scripted) -> None:
    scripted.say("word " * 500)
    for _ in range(5):
        with scripted.http.stream("POST", "/v1/responses", json=BODY) as answer:
            next(answer.iter_lines())
    scripted.say("Hello.")
    assert (
        check(scripted.http.post("/v1/responses", json=BODY).text).response["status"] == "completed"
    )
