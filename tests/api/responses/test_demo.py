"""The Responses dialect on the demo model, by OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxstack.api.dialects.openai_responses.recent_items import RecentItems
from mlxstack.api.dialects.openai_responses.response_schema import MessageItem, OutputText
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.responses.checking import KINDS, told, whole
from tests.api.running import Running, running
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

WEATHER: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather of a city",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
QUESTION = "What is the weather in Paris?"
HELLO = {"role": "user", "content": "Say hello."}
NEXT = {"role": "user", "content": "Say it again."}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False, max_tokens=256),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def sdk(demo: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def http(demo: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url, timeout=PATIENCE_S) as client:
        yield client


def test_the_client_runs_a_tool_loop(sdk: openai.OpenAI) -> None:
    """The tool is required: which one a model of few megabytes would choose is not the point."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = sdk.responses.create(
        model="demo", input=items, tools=WEATHER, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    assert isinstance(json.loads(call.arguments), dict)
    items += [item.model_dump(exclude_none=True) for item in first.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = sdk.responses.create(model="demo", input=[*items, output], tools=WEATHER)
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens - 8, "all but the opening of the answer is reused"


def test_the_client_streams_with_tools(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model="demo", input=QUESTION, tools=WEATHER) as stream:
        for event in stream:
            KINDS[event.type].model_validate(event.model_dump(exclude_unset=True, by_alias=True))
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output


def test_the_raw_events_of_the_client_are_of_its_types(sdk: openai.OpenAI) -> None:
    numbers = []
    for event in sdk.responses.create(model="demo", input=QUESTION, tools=WEATHER, stream=True):
        KINDS[event.type].model_validate_json(
            event.model_dump_json(exclude_unset=True), strict=True
        )
        numbers.append(event.sequence_number)
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("thinking", [False, True])
def test_stream_and_whole_say_the_same(http: httpx.Client, thinking: bool) -> None:
    body = {
        "input": QUESTION,
        "tools": WEATHER,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }

    def bare(response: dict[str, Any]) -> list[Any]:
        return [
            (item["type"], item.get("content"), item.get("arguments"))
            for item in response["output"]
        ]

    assert bare(told(http, body).response) == bare(whole(http, body))


def test_a_cut_answer_is_incomplete(http: httpx.Client) -> None:
    body = {"input": "Tell me something.", "max_output_tokens": 2, "ignore_eos": True}
    found = told(http, body)
    assert found.events[-1]["type"] == "response.incomplete"
    assert found.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in found.response["output"]] == ["incomplete"]
    assert found.response["usage"]["output_tokens"] == 2


def test_logprobs_of_both(http: httpx.Client) -> None:
    body = {
        "input": "Say hello.",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 8,
    }
    (item,) = whole(http, body)["output"]
    found = item["content"][0]["logprobs"]
    assert found
    assert all(len(one["top_logprobs"]) == 2 for one in found)
    deltas = [one["logprobs"] for one in told(http, body).of("output_text.delta")]
    assert [one["token"] for several in deltas for one in several] == [
        one["token"] for one in found
    ]


def test_the_caches_answer_in_the_headers(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "Say hello.", "max_output_tokens": 1})
    assert "x-mlx-stack-cache-prefix-tokens" in answer.headers


def references(output: list[Any]) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": item["id"]} for item in output]


@pytest.mark.parametrize("ask", [whole, lambda http, body: told(http, body).response])
@pytest.mark.parametrize("more", [{}, {"tools": WEATHER, "tool_choice": "required"}])
def test_a_reference_is_as_good_as_its_item(
    http: httpx.Client, ask: Any, more: dict[str, Any]
) -> None:
    output = ask(http, {"input": [HELLO], **more})["output"]
    assert output
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in output
        if item["type"] == "function_call"
    ]
    assert bool(results) is bool(more)
    answers = [
        whole(http, {"input": [HELLO, *said, *results, NEXT], **more})
        for said in (output, references(output))
    ]
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"]
    assert [item.get("content") for item in answers[0]["output"]] == [
        item.get("content") for item in answers[1]["output"]
    ]
    counted = http.post("/v1/responses/input_tokens", json={
        "input": [HELLO, *references(output), *results, NEXT], **more,
    })  # fmt: skip
    assert counted.status_code == 200


def test_what_is_not_kept_is_refused_with_a_remedy(http: httpx.Client) -> None:
    forgotten = whole(http, {"input": [HELLO], "store": False})["output"]
    salted = whole(http, {"input": [HELLO], "cache_salt": "other"})["output"]
    for output in (forgotten, salted, [{"id": "msg_unknown"}], [{"id": None}]):
        answer = http.post("/v1/responses", json={"input": [*references(output), NEXT]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "input[0]"
        assert "store = false" in error["message"]


def test_the_oldest_items_go_first() -> None:
    def item(name: str) -> MessageItem:
        return MessageItem(name, "completed", (OutputText("x" * 1000),))

    kept = RecentItems(max_bytes=2500)
    for name in ("a", "b"):
        kept.add(item(name), "")
    kept.resolve(references([{"id": "a"}]), "")
    kept.add(item("c"), "")
    assert [one["id"] for one in kept.resolve(references([{"id": "a"}, {"id": "c"}]), "")] == [
        "a",
        "c",
    ]
    with pytest.raises(BadRequest, match="'b' not found"):
        kept.resolve(references([{"id": "b"}]), "")
    kept.add(MessageItem("huge", "completed", (OutputText("x" * 3000),)), "")
    with pytest.raises(BadRequest):
        kept.resolve(references([{"id": "huge"}]), "")
