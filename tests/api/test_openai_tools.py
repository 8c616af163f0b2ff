"""Tool calls on the wire: what OpenAI's client makes of exactly known tokens."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.core.preset import ServerSpec
from mlxstack.service.generation_options import ToolChoiceMode
from tests.api.running import serving, standing
from tests.service.standin import FACTS

pytestmark = pytest.mark.net

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
USER: list[Any] = [{"role": "user", "content": "how is it in Ulm?"}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A client of a service that always says some words, and then makes two calls."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = engine.tokenizer.encode(f"I look.\n{CALL}\n{CALL}", add_special_tokens=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=USER, tools=TOOLS, extra_body=PLAIN, **more
    )


def test_o7_a_whole_answer_with_calls(client: openai.OpenAI) -> None:
    answer = ask(client)
    ChatCompletion.model_validate(json.loads(answer.model_dump_json(exclude_unset=True)))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Ulm"}] * 2
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in calls)


def test_streamed_calls_name_themselves_once(client: openai.OpenAI) -> None:
    deltas = []
    for chunk in ask(client, stream=True):
        ChatCompletionChunk.model_validate(json.loads(chunk.model_dump_json(exclude_unset=True)))
        deltas += [call for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        n_pieces = len(own) - 1
        assert n_pieces > 1
        assert [delta.id is not None for delta in own] == [True] + [False] * n_pieces
        assert [delta.function.name for delta in own] == ["weather"] + [None] * n_pieces
        assert json.loads("".join(d.function.arguments for d in own)) == {"city": "Ulm"}
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_sdk_accumulates_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=USER, tools=TOOLS, extra_body=PLAIN
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["weather", "weather"]


def test_parallel_tool_calls_false_ends_after_one(client: openai.OpenAI) -> None:
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_tool_choice_none_makes_no_calls(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "<tool_call>" in choice.message.content


@pytest.mark.parametrize("calling", list(ToolChoiceMode))
def test_allowed_tools_follow_their_mode(calling: ToolChoiceMode) -> None:
    allowed = {"mode": calling.value, "tools": [{"type": "function", "function": {"name": "a"}}]}
    assert (
        to_conversation.tool_choice_mode({"type": "allowed_tools", "allowed_tools": allowed})
        is calling
    )
