"""What Codex sends is understood, and what it hears back makes it do the right thing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.responses import codex
from tests.api.responses.checking import Told, told, whole
from tests.api.responses.conftest import Scripted
from tests.api.running import Running, running
from tests.patience import PATIENCE_S


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sent(stage: Scripted, *items: dict[str, Any]) -> Told:
    return told(stage.http, codex.request(*items))


@pytest.mark.net
def test_a_namespace_call_is_answered_with_its_namespace(scripted: Scripted) -> None:
    scripted.say(call("close_agent", target="a1"))
    (item,) = sent(scripted).response["output"]
    assert (item["type"], item["name"]) == ("function_call", "close_agent")
    assert item["namespace"] == "multi_agent_v1"


@pytest.mark.net
@pytest.mark.parametrize("joint", [".", "__"])
def test_a_name_with_its_namespace_in_front_is_understood(scripted: Scripted, joint: str) -> None:
    scripted.say(call(f"multi_agent_v1{joint}close_agent", target="a1"))
    (item,) = sent(scripted).response["output"]
    assert (item["name"], item["namespace"]) == ("close_agent", "multi_agent_v1")


@pytest.mark.net
def test_a_plain_call_has_no_namespace(scripted: Scripted) -> None:
    scripted.say(call("exec_command", cmd="ls"))
    (item,) = sent(scripted).response["output"]
    assert "namespace" not in item


@pytest.mark.net
def test_a_custom_tool_is_called_with_free_text(scripted: Scripted) -> None:
    scripted.say(call("apply_patch", input="*** Begin\n+1\n"))
    found = sent(scripted)
    (item,) = found.response["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin\n+1\n")
    assert found.of("custom_tool_call_input.done")[0]["input"] == item["input"]
    assert "start: begin hunk+ end" in scripted.prompt()


@pytest.mark.net
def test_two_namespaces_may_have_tools_of_one_name(scripted: Scripted) -> None:
    spaces = [
        {"type": "namespace", "name": name, "description": "", "tools": [codex.function("search")]}
        for name in ("mail", "files")
    ]
    scripted.say(call("search") + call("files__search"))
    body = {**codex.request(), "tools": spaces}
    one, two = told(scripted.http, body).response["output"]
    assert (one["name"], one["namespace"]) == ("search", "mail")
    assert (two["name"], two["namespace"]) == ("search", "files")
    history = [
        {"type": "function_call", "call_id": f"c{i}", "name": "search", "namespace": name}
        for i, name in enumerate(("mail", "files"))
    ]
    told(scripted.http, {**body, "input": [*codex.START, *history]})
    assert '"name": "files__search"' in scripted.prompt()


EXEC = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


@pytest.mark.net
def test_tools_of_an_item_are_offered(scripted: Scripted) -> None:
    """Codex sends all its tools as an item before the messages."""
    scripted.say(call("exec", input="ls"))
    added = {"type": "additional_tools", "role": "developer", "tools": [EXEC]}
    body = {**codex.request(), "tools": [], "input": [added, *codex.START]}
    (item,) = told(scripted.http, body).response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "exec", "ls")
    assert item["namespace"] == "functions"
    assert '"name": "exec"' in scripted.prompt().partition("<|im_end|>")[0]
    made = told(scripted.http, {**body, "tool_choice": {"type": "custom", "name": "exec"}})
    assert made.response["output"][0]["type"] == "custom_tool_call"


@pytest.mark.net
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_search_of_the_client_finds_tools(scripted: Scripted, is_streamed: bool) -> None:
    scripted.say(call("tool_search", query="calendar"))
    body = {**codex.request(), "tools": [*codex.TOOLS, SEARCH]}
    ask = told if is_streamed else _whole
    (item,) = ask(scripted.http, body).response["output"]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "calendar"}
    head, _, _ = scripted.prompt().partition("<|im_end|>")
    found = [{"type": "namespace", "name": "cal", "tools": [codex.function("book")]}]
    result = {"type": "tool_search_output", "call_id": item["call_id"], "tools": found}
    again = {**body, "input": [*codex.START, item, {**result, "execution": "client"}]}
    scripted.say(call("book"))
    (item,) = ask(scripted.http, again).response["output"]
    assert (item["name"], item["namespace"]) == ("book", "cal")
    assert scripted.prompt().startswith(head), "found tools leave the head as it was"
    assert "Does book" in scripted.prompt()


def _whole(http: httpx.Client, body: dict[str, Any]) -> Told:
    return Told([], whole(http, {**body, "stream": False}))


@pytest.mark.net
def test_the_message_of_another_agent_is_read(scripted: Scripted) -> None:
    parts = [{"type": "input_text", "text": "It is done."}, {"type": "encrypted_content"}]
    sent(scripted, {"type": "agent_message", "author": "/root/worker", "content": parts})
    assert "Message from /root/worker:\nIt is done.\n[encrypted" in scripted.prompt()


@pytest.mark.net
def test_only_tools_that_can_be_called_are_in_the_prompt(scripted: Scripted) -> None:
    sent(scripted)
    prompt = scripted.prompt()
    for name in ("exec_command", "spawn_agent", "close_agent", "apply_patch"):
        assert f'"name": "{name}"' in prompt
    assert "web_search" not in prompt


@pytest.mark.net
def test_developers_are_one_system_prompt(scripted: Scripted) -> None:
    sent(scripted)
    prompt = scripted.prompt()
    assert "You are a coding agent.\n\nSkills come here.Permissions come here." in prompt
    assert prompt.count("<|im_start|>system") == 1


@pytest.mark.net
def test_a_turn_of_the_assistant_is_one(scripted: Scripted) -> None:
    sent(scripted, *codex.LOOP)
    prompt = scripted.prompt()
    turn = prompt[prompt.index("I run it.") :]
    assert turn.index("exec_command") < turn.index("<|im_start|>")
    assert "echo MARKER" in turn
    assert "exit code 0\nMARKER" in turn
    assert "gAAAAB" not in prompt


@pytest.mark.net
def test_the_session_is_hinted_by_the_thread(scripted: Scripted) -> None:
    scripted.http.post(
        "/v1/responses", json=codex.request(), headers=codex.HEADERS
    ).raise_for_status()
    assert scripted.engine.asked[-1].caller.session_hint == f"codex:{codex.THREAD}"
    assert scripted.engine.asked[-1].agent is None


@pytest.mark.net
def test_thoughts_come_back_sealed(scripted: Scripted) -> None:
    """Codex returns `encrypted_content` and drops the readable content."""
    scripted.say("The folder is empty, so I look.\n</think>\n\n" + call("exec_command", cmd="ls"))
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    output = told(scripted.http, {**codex.request(), **thinking}).response["output"]
    thoughts, called = output
    assert thoughts["encrypted_content"]
    returned = {**thoughts, "content": None}
    output_item = {"type": "function_call_output", "call_id": called["call_id"], "output": "a.txt"}
    said = conversation(ResponsesBody(input=[returned, called, output_item]), ToolNames()).messages
    assert said[0].reasoning == "The folder is empty, so I look."
    assert said[0].tool_calls[0].id == called["call_id"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The demo model with room for the words of a real client."""
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=32768),
        sampling=SamplingSpec(temperature=0, thinking=False, max_tokens=16),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.mark.mlx
@pytest.mark.net
def test_the_second_request_of_a_loop_is_cached(wide: Running) -> None:
    with httpx.Client(base_url=wide.url, timeout=PATIENCE_S) as http:
        first = told(http, codex.request()).response["usage"]
        second = told(http, codex.request(*codex.LOOP)).response["usage"]
    assert second["input_tokens_details"]["cached_tokens"] >= 0.95 * first["input_tokens"]
