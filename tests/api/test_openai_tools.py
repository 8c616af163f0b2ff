"""Tool calls on the wire: what OpenAI's client makes of exactly known tokens."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.tool_choice import chosen_tool, tool_choice_mode
from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ServerSpec
from mlxstack.service.parts.generation_options import ToolChoiceMode
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
    assert tool_choice_mode({"type": "allowed_tools", "allowed_tools": allowed}) is calling


PATCH_TOOLS: list[Any] = [
    {"type": "custom", "custom": {"name": "patch", "description": "d"}},
    {"type": "custom", "name": "patch", "description": "d"},
]
FUNCTION: dict[str, Any] = TOOLS[0]["function"]
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "one\\ntwo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def patching() -> Iterator[httpx.Client]:
    """A client of a service that always calls a custom tool."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = engine.tokenizer.encode(PATCH_CALL, add_special_tokens=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        httpx.Client(base_url=f"{found.url}/v1") as made,
    ):
        yield made


def converted(**more: Any) -> Conversation:
    return to_conversation.conversation(msgspec.convert({"messages": USER, **more}, ChatBody))


@pytest.mark.parametrize("tool", PATCH_TOOLS, ids=["nested", "flat"])
def test_a_custom_tool_is_called_with_free_text(patching: httpx.Client, tool: Any) -> None:
    body = {"messages": USER, "tools": [tool], **PLAIN}
    answer = patching.post("/chat/completions", json=body).json()
    (call,) = ChatCompletion.model_validate(answer).choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", "one\ntwo")
    lines = patching.post("/chat/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [one["choices"][0]["delta"] for one in chunks]
    pieces = [call["custom"] for one in deltas for call in one.get("tool_calls", ())]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["patch"]
    assert "".join(piece["input"] for piece in pieces) == "one\ntwo"


@pytest.mark.parametrize(
    "grammar", [{"grammar": {"definition": "start: A"}}, {"definition": "start: A"}]
)
def test_a_custom_tool_has_its_grammar_in_the_description(grammar: dict[str, Any]) -> None:
    form = {"type": "grammar", **grammar}
    (tool,) = converted(tools=[{"type": "custom", "custom": {"name": "p", "format": form}}]).tools
    assert "start: A" in tool.description


def test_a_tool_choice_names_a_custom_tool() -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}}
    body = msgspec.convert({"messages": USER, "tool_choice": choice}, ChatBody)
    assert chosen_tool(to_conversation.tool_choice(body)) == "patch"
    assert tool_choice_mode(choice) is ToolChoiceMode.REQUIRED


def test_a_custom_call_of_the_history_is_kept() -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "one"}}
    messages = [*USER, {"role": "assistant", "tool_calls": [called]}]
    (call,) = converted(messages=messages).messages[-1].tool_calls
    assert (call.name, call.arguments) == ("patch", {"input": "one"})


def test_functions_are_tools_and_answered_as_a_function_call(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "messages": USER, "functions": [FUNCTION]}
    choice = client.chat.completions.create(**body, extra_body=PLAIN).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call and choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Ulm"}
    stream = client.chat.completions.create(**body, stream=True, extra_body=PLAIN)
    deltas = [chunk.choices[0].delta.function_call for chunk in stream]
    pieces = [delta for delta in deltas if delta is not None]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"city": "Ulm"}


def test_function_call_is_a_tool_choice_and_part_of_the_history() -> None:
    sent = {"messages": USER, "functions": [FUNCTION], "function_call": {"name": "weather"}}
    choice = to_conversation.tool_choice(msgspec.convert(sent, ChatBody))
    assert chosen_tool(choice) == "weather"
    called = {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}}
    (call,) = converted(messages=[*USER, called]).messages[-1].tool_calls
    assert (call.name, call.arguments) == ("weather", {})


def test_a_flat_function_is_offered() -> None:
    flat = {"type": "function", **FUNCTION}
    assert converted(tools=[flat]).tools == converted(tools=TOOLS).tools


def test_a_tool_of_a_vendors_server_is_named_when_it_is_alone() -> None:
    with pytest.raises(BadRequest, match=r"'web_search', .*a tool that runs on a vendor's servers"):
        converted(tools=[{"type": "web_search"}])
    assert len(converted(tools=[{"type": "web_search"}, *TOOLS]).tools) == 1
