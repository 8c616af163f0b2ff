"""Threads of Anthropic's servers: refused by the code with which its SDKs go on without one."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.thread_unsupported_request_error import ThreadUnsupportedRequestError

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.running import Running
from tests.gateway.gateway_thread import WAYS, running_behind

pytestmark = [pytest.mark.mlx, pytest.mark.net]

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
THREADS: list[Any] = [
    {"type": "create"},
    {"type": "continue", "previous_message_id": "msg_1"},
    {"type": "of_the_future"},
    {},
    "create",
]


@pytest.fixture(scope="module", params=WAYS)
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False),
        server=ServerSpec(port=0),
    )
    with running_behind(request.param, preset, tmp_path_factory.mktemp("demo")) as found:
        yield found


@pytest.fixture
def claude(demo: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="x", max_retries=0) as client:
        yield client


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_comes_to_its_answer(claude: anthropic.Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 200, "messages": QUESTION}
    runner = claude.beta.messages.tool_runner(**asked, tools=[get_weather], stream=stream)
    for _ in runner:
        pass
    answer = runner.until_done()
    assert answer.stop_reason == "end_turn"
    assert "sunny" in answer.content[-1].text


def test_a_thread_of_the_sdk_ends_with_its_own_error(claude: anthropic.Anthropic) -> None:
    thread = claude.beta.messages.thread(model="demo", max_tokens=9)
    with pytest.raises(ThreadUnsupportedRequestError) as refused:
        thread.send(*QUESTION)
    assert refused.value.details.unsupported == ["thread"]
    going_on = claude.beta.messages.thread(
        model="demo", max_tokens=9, unsupported_request_behavior="continue_unthreaded"
    )
    assert going_on.send(*QUESTION).role == "assistant"


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_thread_is_refused_by_the_published_code(
    demo: Running, thread: Any, stream: bool
) -> None:
    body = {"max_tokens": 9, "messages": QUESTION, "thread": thread, "stream": stream}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/batch/messages"):
        answer = httpx.post(demo.url + path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert error["message"].startswith("thread ")
