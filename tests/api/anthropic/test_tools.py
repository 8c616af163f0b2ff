"""Tool calls on the wire: what Anthropic's client makes of exactly known tokens."""

import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from msgspec import Struct

from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation
from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ServerSpec
from tests.api.anthropic.speaking import PATH, PLAIN, blocks, stream
from tests.api.running import serving, standing
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "name": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
]
USER: list[Any] = [{"role": "user", "content": "how is it in Ulm?"}]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": USER, "tools": TOOLS, **PLAIN}


class Stage(Struct):
    """A service whose model says what a test wants."""

    engine: StandIn
    claude: anthropic.Anthropic
    http: httpx.Client

    def says(self, text: str) -> None:
        """From now on."""
        self.engine.script = self.engine.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, **more: Any) -> anthropic.types.Message:
        """A whole answer."""
        found = self.claude.messages.create(
            model="m", max_tokens=99, messages=USER, tools=TOOLS, extra_body=PLAIN, **more
        )
        assert isinstance(found, anthropic.types.Message)
        return found


HANDS: list[Any] = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "bash_20241022", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
    {"type": "text_editor_20250124", "name": "str_replace_editor"},
    {"type": "memory_20250818", "name": "memory"},
]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        anthropic.Anthropic(base_url=found.url, api_key="x", max_retries=0) as claude,
        httpx.Client(base_url=found.url) as http,
    ):
        yield Stage(engine, claude, http)


def test_a23u_words_and_two_calls(stage: Stage) -> None:
    stage.says(f"I look.\n{CALL}\n{CALL}")
    answer = stage.ask()
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    first, second = (block for block in answer.content if block.type == "tool_use")
    assert first.input == second.input == {"city": "Ulm"}
    assert first.id != second.id
    assert first.id.startswith("toolu_")
    assert len(first.id) == len("toolu_") + 24


def test_a30_the_client_accumulates_a_streamed_call(stage: Stage) -> None:
    stage.says(f"I look.\n{CALL}\n{CALL}")
    with stage.claude.messages.stream(
        model="m", max_tokens=99, messages=USER, tools=TOOLS, extra_body=PLAIN
    ) as found:
        final = found.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [b.input for b in final.content if b.type == "tool_use"] == [{"city": "Ulm"}] * 2


def test_text_before_and_after_a_call_keeps_its_place(stage: Stage) -> None:
    stage.says(f"Before.\n{CALL}\nAfter.")
    assert [block.type for block in stage.ask().content] == ["text", "tool_use", "text"]
    found = blocks(stream(stage.http, BODY))
    assert [block.get("text") for block in found] == ["Before.", None, "After."]


def test_a23_no_parallel_calls_if_none_are_wanted(stage: Stage) -> None:
    stage.says(f"{CALL}\n{CALL}")
    answer = stage.ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.stop_reason == "tool_use"


def test_tool_choice_decides_what_the_engine_may_say(stage: Stage) -> None:
    stage.says("Fine.")
    opening = stage.engine.tokenizer.tool_call_start_tokens
    stage.ask(tool_choice={"type": "none"})
    forbidden = stage.engine.asked[-1]
    assert (opening[0], float("-inf")) in forbidden.sampling.logit_bias
    stage.ask()
    free = stage.engine.asked[-1]
    assert free.sampling.logit_bias == ()
    assert free.tokens == forbidden.tokens, "the prompt is the same, so that the cache is"
    for wanted in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        stage.ask(tool_choice=wanted)
        assert stage.engine.asked[-1].tokens == free.tokens + tuple(opening)


def test_a24_a_call_without_sense_becomes_text(stage: Stage) -> None:
    stage.says("<tool_call>\nnonsense\n</tool_call>")
    answer = stage.ask()
    assert answer.stop_reason == "end_turn"
    assert answer.content[0].type == "text"
    assert "nonsense" in answer.content[0].text


def test_thinking_text_and_call_are_three_blocks(stage: Stage) -> None:
    stage.says(f"I wonder.\n</think>\n\nI look.\n{CALL}")
    sent = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    found = blocks(stream(stage.http, sent))
    assert [block["type"] for block in found] == ["thinking", "text", "tool_use"]
    assert found[0]["thinking"] == "I wonder."
    assert found[0]["signature"]
    assert found[1]["text"] == "I look."
    whole = stage.http.post(PATH, json=sent).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]


def test_a20_a_deferred_tool_can_be_called(stage: Stage) -> None:
    stage.says('<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>')
    (block,) = stage.ask().content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("later", {})
    prompt = stage.engine.tokenizer.decode(list(stage.engine.asked[-1].tokens))
    assert "weather" in prompt
    assert "later" not in prompt


def test_the_hint_reaches_the_engine_and_nobody_waits_for_it(stage: Stage) -> None:
    stage.says("Fine.")
    names = {"x-claude-code-session-id": "uuid", "x-claude-code-agent-id": "a1"}
    stage.http.post(PATH, json=BODY, headers=names).raise_for_status()
    asked = stage.engine.asked[-1]
    assert asked.caller.session_hint == "claude:uuid/a1"
    assert asked.agent is None
    owner = {"user_id": '{"device_id":"d","account_uuid":"","session_id":"uuid"}'}
    stage.http.post(PATH, json={**BODY, "metadata": owner}).raise_for_status()
    assert stage.engine.asked[-1].caller.session_hint == "claude:uuid"
    chat = {"messages": USER, "prompt_cache_key": "k"}
    stage.http.post("/v1/chat/completions", json=chat).raise_for_status()
    assert stage.engine.asked[-1].caller.session_hint == "key:k"
    opencode = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
    stage.http.post("/v1/chat/completions", json=chat, headers=opencode).raise_for_status()
    assert stage.engine.asked[-1].caller.session_hint == "opencode:ses_1"


def asked(**more: Any) -> Conversation:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    return conversation(msgspec.convert(body, MessagesBody))


@pytest.mark.parametrize("tool", HANDS, ids=lambda tool: tool["type"])
def test_a_typed_client_tool_is_offered_with_its_published_schema(tool: dict[str, Any]) -> None:
    choice = {"type": "tool", "name": tool["name"]}
    (offered,) = asked(tools=[tool], tool_choice=choice).tools
    assert offered.name == tool["name"] and offered.description
    command = offered.parameters["properties"]["command"]
    has_undo = tool["name"] == "str_replace_editor"
    assert ("undo_edit" in command.get("enum", ())) is has_undo


def test_a_typed_client_tool_that_joins_later_has_its_schema() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": HANDS[0]}}
    turns = [{"role": "user", "content": "hi"}, {"role": "system", "content": [added]}]
    (offered,) = asked(messages=turns).tools
    assert offered.parameters["properties"].keys() == {"command", "restart"}


@pytest.mark.parametrize("kind", ["computer_20250124", "computer_20251124"])
def test_the_computer_tool_is_refused_by_name(kind: str) -> None:
    computer = {"type": kind, "name": "computer", "display_width_px": 9, "display_height_px": 9}
    with pytest.raises(BadRequest, match=f"{kind} is not supported") as refused:
        asked(tools=[*HANDS, computer])
    assert refused.value.param == "tools[5].type"


@pytest.mark.parametrize("kind", ["web_search_20250305", "web_fetch_20250910", "mcp_toolset"])
def test_a_server_tool_alone_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest, match=f"web is of type {kind}, a tool that runs on Anthropic"):
        asked(tools=[{"type": kind, "name": "web"}])


def test_a_forced_server_tool_is_refused_beside_others() -> None:
    with pytest.raises(BadRequest, match="runs on Anthropic's servers") as refused:
        asked(tools=[*TOOLS, SEARCH], tool_choice={"type": "tool", "name": "web_search"})
    assert refused.value.param == "tool_choice.name"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_header_names_the_tools_that_are_left_out(stage: Stage, is_streamed: bool) -> None:
    body = {**BODY, "tools": [*TOOLS, SEARCH], "stream": is_streamed}
    answer = stage.http.post(PATH, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-mlx-stack-omitted-tools"] == "web_search"
