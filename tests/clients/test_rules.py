"""Rules of the wire that no other test names."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlxstack.core.conversation import Conversation, Message, Role, Tool
from mlxstack.core.response_parts import ContentPart, KeepAlive, ResponsePart, ToolCallPart
from mlxstack.service.calls.admission import admit
from mlxstack.service.calls.generation import stream_response
from mlxstack.service.parts.generation_options import GenerationOptions
from tests.api.running import Running
from tests.clients.lines import CLAUDES, HELLO, PARAMETERS, TOOL
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

HI: list[Any] = [{"role": "user", "content": "hello there"}]
CHAT: dict[str, Any] = {"model": "local-model", "messages": HI, "max_tokens": 60}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/completion", {"prompt": "x", "n_predict": 1}),
        ("/v1/responses", {"input": "hello there", "max_output_tokens": 20}),
        ("/v1/responses/input_tokens", {"input": "hello there"}),
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [65]}),
        ("/apply-template", {"messages": HI}),
    ],
)
def test_x1_x5_posts_answer_200_whatever_the_query(
    stage: Running, path: str, body: dict[str, Any]
) -> None:
    answer = httpx.post(f"{stage.url}{path}?beta=true&x=%20", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_x8_streams_are_plain_flushed_events(stage: Running, path: str) -> None:
    headers = {"Accept-Encoding": "gzip, br, zstd"}
    with httpx.stream(
        "POST", stage.url + path, json={**CHAT, "stream": True}, headers=headers, timeout=PATIENCE_S
    ) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in answer.headers
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")


def test_a21u_a32_thoughts_are_signed_and_counted(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "local-model", "max_tokens": 200, "messages": HI}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(**asked, thinking=thinking) as stream:
        message = stream.get_final_message()
    thought, text = message.content
    assert thought.type == "thinking"
    assert thought.signature
    assert text.type == "text"
    bare = claude.messages.create(**asked, thinking={"type": "disabled"})
    assert message.usage.output_tokens > bare.usage.output_tokens + 2
    forged = {**thought.to_dict(), "signature": "of somebody else"}
    history = [*HI, {"role": "assistant", "content": [forged, text.to_dict()]}, *HI]
    again = claude.messages.create(**{**asked, "messages": history})
    assert again.content[-1].type == "text"
    assert again.content[-1].text == HELLO


def test_a35_a_long_call_is_not_silent(stage: Running) -> None:
    async def parts() -> list[ResponsePart]:
        messages = (Message(Role.USER, "weather in Paris"),)
        conversation = Conversation(
            messages, (Tool("get_weather", "", PARAMETERS),), thinking=False
        )
        generation = await admit(
            stage.service, conversation, GenerationOptions("a35", max_tokens=200)
        )
        return [part async for part in stream_response(stage.service, generation, 0.0, 0.0)]

    parts_of_call = asyncio.run_coroutine_threadsafe(parts(), stage.loop).result(PATIENCE_S)
    (called,) = [i for i, part in enumerate(parts_of_call) if isinstance(part, ToolCallPart)]
    assert not any(isinstance(part, ContentPart) for part in parts_of_call)
    assert sum(isinstance(part, KeepAlive) for part in parts_of_call[:called]) > 3


def test_o4_c7_c8_rules_may_come_late_and_twice(gpt: openai.OpenAI, stage: Running) -> None:
    first: list[Any] = [
        {"role": "system", "content": "Rules."},
        {"role": "developer", "content": "More rules."},
        {"role": "user", "content": "hello there"},
    ]
    later = [
        *first,
        {"role": "assistant", "content": HELLO},
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "hello there again"},
    ]
    usage = gpt.chat.completions.create(model="any", messages=first).usage
    again = gpt.chat.completions.create(model="any", messages=later)
    assert again.choices[0].message.content == HELLO
    assert usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= usage.prompt_tokens - 2


def test_o5_thoughts_are_reasoning_content_and_come_back_by_either_name(stage: Running) -> None:
    def ask(*thought: Any) -> Any:
        url = f"{stage.url}/v1/chat/completions"
        answer = httpx.post(url, json={**CHAT, "messages": [*thought]}, timeout=PATIENCE_S)
        return answer.raise_for_status().json()["choices"][0]["message"]

    message = ask(*HI)
    assert message["reasoning_content"] == "A greeting."
    for name in ("reasoning_content", "reasoning"):
        thought = {"role": "assistant", "content": HELLO, name: "A greeting."}
        assert ask(*HI, thought, *HI)["content"] == HELLO


def test_o10_a_model_is_found_though_its_name_has_slashes(stage: Running) -> None:
    listed = httpx.get(f"{stage.url}/v1/models").json()["data"]
    for model in listed:
        assert httpx.get(f"{stage.url}/v1/models/{model['id']}").json()["id"] == model["id"]
    absent = httpx.get(f"{stage.url}/v1/models/some/body/else")
    assert absent.status_code in (200, 404)
    assert "detail" not in absent.json()


def test_r2_the_sdk_streams_every_field(gpt: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **TOOL["function"], "strict": False}]
    with gpt.responses.stream(model="m", input="weather in Paris", tools=tools) as stream:
        events = [event.model_dump() for event in stream]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    for event in events:
        if event["type"].endswith((".delta", ".done")):
            assert "output_index" in event
    assert CLAUDES["name"] == events[-1]["response"]["output"][-1]["name"]
