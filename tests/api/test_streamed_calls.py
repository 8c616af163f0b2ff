"""Arguments of calls come in pieces, in every dialect, as the clients' libraries read them."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlxstack.core.preset import ServerSpec
from tests.api.running import Running, serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

pytestmark = pytest.mark.net

WORDS = " ".join(f"w{n:02}" for n in range(30))
ARGUMENTS = {"path": WORDS, "n": 3}
CALL = f'<tool_call>\n{{"name": "edit", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
INPUT = f'a"b\n{WORDS}'
PATCH = CALL.replace("edit", "patch").replace(json.dumps(ARGUMENTS), json.dumps({"input": INPUT}))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
}
TOOL: Any = {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}
USER: list[Any] = [{"role": "user", "content": "Edit it."}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
MAX_TOKENS = 40


class Scripted:
    """A service that answers with one text, and its engine."""

    def __init__(self, found: Running, engine: Any) -> None:
        self.url = found.url
        self._engine = engine

    def says(self, text: str) -> None:
        self._engine.script = self._engine.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        yield Scripted(found, engine)


def events_of(scripted: Scripted, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{scripted.url}{path}", json={"model": "m", **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_chat_sends_arguments_in_pieces(scripted: Scripted) -> None:
    scripted.says(f"I look.\n{CALL}\n{CALL}")
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="x", max_retries=0) as client:
        for n in (1, 2):
            chunks = list(
                client.chat.completions.create(
                    model="m", messages=USER, tools=[TOOL], n=n, stream=True, extra_body=PLAIN
                )
            )
            for choice in range(n):
                own = [one for chunk in chunks for one in chunk.choices if one.index == choice]
                assert own[-1].finish_reason == "tool_calls"
                for index in (0, 1):
                    pieces = [
                        call.function.arguments
                        for one in own
                        for call in one.delta.tool_calls or ()
                        if call.index == index and call.function is not None
                    ]
                    assert len(pieces) > 20
                    assert json.loads("".join(one or "" for one in pieces)) == ARGUMENTS
        whole = client.chat.completions.create(
            model="m", messages=USER, tools=[TOOL], extra_body=PLAIN
        )
        (call, _) = whole.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.arguments == "".join(
            one or "" for one in pieces
        )


def test_chat_ends_a_cut_call_with_its_length(scripted: Scripted) -> None:
    scripted.says(CALL)
    body = {"messages": USER, "tools": [TOOL], "max_tokens": MAX_TOKENS, **PLAIN}
    chunks = events_of(scripted, "/v1/chat/completions", {**body, "stream": True})
    deltas = [one for chunk in chunks for choice in chunk["choices"] for one in [choice["delta"]]]
    sent = "".join(
        call["function"]["arguments"] for one in deltas for call in one.get("tool_calls", ())
    )
    assert not any(one.get("content") for one in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    (whole,) = httpx.post(f"{scripted.url}/v1/chat/completions", json=body).json()["choices"]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == sent
    assert json.dumps(ARGUMENTS, separators=(",", ":")).startswith(sent) and '"path":"w00' in sent


def test_messages_send_input_in_pieces(scripted: Scripted) -> None:
    scripted.says(f"I look.\n{CALL}")
    tools: list[Any] = [{"name": "edit", "input_schema": SCHEMA, "eager_input_streaming": True}]
    with (
        anthropic.Anthropic(base_url=scripted.url, api_key="x", max_retries=0) as client,
        client.messages.stream(
            model="m", max_tokens=500, messages=USER, tools=tools, thinking={"type": "disabled"}
        ) as stream,
    ):
        found = list(stream)
        final = stream.get_final_message()
    assert sum(one.type == "input_json" for one in found) > 20
    assert final.stop_reason == "tool_use"
    assert final.content[-1].type == "tool_use" and final.content[-1].input == ARGUMENTS


def test_messages_end_a_cut_call_with_max_tokens(scripted: Scripted) -> None:
    scripted.says(CALL)
    body: dict[str, Any] = {"messages": USER, "max_tokens": MAX_TOKENS}
    body["thinking"] = {"type": "disabled"}
    body["tools"] = [{"name": "edit", "input_schema": SCHEMA}]
    found = events_of(scripted, "/v1/messages", {**body, "stream": True})
    assert [one["delta"]["stop_reason"] for one in found if one["type"] == "message_delta"] == [
        "max_tokens"
    ]
    whole = httpx.post(f"{scripted.url}/v1/messages", json={"model": "m", **body}).json()
    assert whole["stop_reason"] == "max_tokens"
    assert WORDS.startswith(whole["content"][-1]["input"]["path"])


def test_responses_send_arguments_in_pieces(scripted: Scripted) -> None:
    scripted.says(CALL)
    tool = {"type": "function", "name": "edit", "parameters": SCHEMA}
    body: dict[str, Any] = {"input": "Edit it.", "tools": [tool], **PLAIN}
    found = events_of(scripted, "/v1/responses", {**body, "stream": True})
    kinds = [one["type"] for one in found]
    deltas = [one["delta"] for one in found if one["type"].endswith("call_arguments.delta")]
    (done,) = (one for one in found if one["type"].endswith("call_arguments.done"))
    assert len(deltas) > 20 and "".join(deltas) == done["arguments"]
    assert json.loads(done["arguments"]) == ARGUMENTS
    assert kinds.index("response.output_item.added") < kinds.index(
        "response.function_call_arguments.delta"
    )
    cut = {**body, "max_output_tokens": MAX_TOKENS, "stream": True}
    last = events_of(scripted, "/v1/responses", cut)[-1]["response"]
    assert (last["status"], last["output"][-1]["status"]) == ("incomplete", "incomplete")


def test_responses_send_the_text_of_a_custom_tool_in_pieces(scripted: Scripted) -> None:
    scripted.says(PATCH)
    body = {"input": "Edit it.", "tools": [{"type": "custom", "name": "patch"}], **PLAIN}
    found = events_of(scripted, "/v1/responses", {**body, "stream": True})
    deltas = [one["delta"] for one in found if one["type"].endswith("tool_call_input.delta")]
    (done,) = (one for one in found if one["type"].endswith("tool_call_input.done"))
    assert len(deltas) > 20
    assert "".join(deltas) == done["input"] == INPUT


def test_ollama_sends_calls_whole(scripted: Scripted) -> None:
    scripted.says(CALL)
    body = {"messages": USER, "tools": [TOOL], "think": False}
    lines = events_of(scripted, "/api/chat", body)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS]
    cut = events_of(scripted, "/api/chat", {**body, "options": {"num_predict": MAX_TOKENS}})
    assert not any(line["message"].get("tool_calls") for line in cut)
    assert cut[-1]["done_reason"] == "length"
