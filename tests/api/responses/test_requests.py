"""Bodies of every shape: read, refused by name, or counted."""

from typing import Any

import msgspec
import openai
import pytest
from msgspec import structs

from mlxstack.api.custom_tools import INPUT
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation, messages
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.core.errors import BadRequest
from tests.api.responses.checking import PLAIN, whole
from tests.api.responses.conftest import Scripted

pytestmark = pytest.mark.net

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def say(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def called(call_id: str, kind: str = "function_call", **more: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, **more}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "Question one", "type": None},
    {"type": "reasoning", "id": "rs", "summary": []},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Calling."}],
    },
    called("c1", name="act", arguments='{"a": 1}'),
    called("c2", name="act", arguments="not json"),
    called("c3", "custom_tool_call", name="patch", input="*** diff"),
    {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"]}},
    called("c1", "function_call_output", output="one"),
    called("c2", "function_call_output", output=[say("two"), IMAGE]),
    called("c3", "custom_tool_call_output", output="three"),
    {"type": "local_shell_call_output", "id": "c4", "output": "four"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
    {"type": "item_reference", "id": "rs_gone"},
    {"type": "of_the_future", "what": [1, {"ever": None}]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "developer", "content": [say("Late rule.")]},
    user(say("Question"), say("two")),
]


def test_items_of_every_kind_are_read_or_left_out(scripted: Scripted) -> None:
    whole(scripted.http, {"input": HISTORY, "instructions": "Be kind."})
    prompt = scripted.prompt()
    wanted = [
        "Be kind.\n\nRules.",
        "Question one",
        "Calling.",
        '{"a": 1}',
        "not json",
        "*** diff",
        "local_shell",
        "one",
        "two\n[image omitted]",
        "three",
        "four",
        "web_search",
        "completed",
        "No.",
        "Late rule.",
        "Question\ntwo",
    ]
    at = 0
    for text in wanted:
        found = prompt.find(text, at)
        assert found >= at, text
        at = found
    assert "rs_gone" not in prompt


def test_thoughts_belong_to_the_turn_that_follows() -> None:
    said = conversation(ResponsesBody(input=HISTORY), ToolNames()).messages
    (turn,) = (message for message in said if message.text == "Calling.")
    assert turn.reasoning == "Hm."
    assert [call.name for call in turn.tool_calls] == ["act", "act", "patch", "local_shell"]
    alone = [*HISTORY[1:4], {"role": "user", "content": "again"}]
    assert [m.text for m in conversation(ResponsesBody(input=alone), ToolNames()).messages] == [
        "Question one",
        "again",
    ], "thoughts that led to nothing are left out"


def test_a_turn_of_many_items_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    replace = structs.replace

    def counted(one: Any, **more: Any) -> Any:
        made.append(more)
        return replace(one, **more)

    monkeypatch.setattr(structs, "replace", counted)
    items = [called(f"call_{n}", name="act") for n in range(300)]
    said = {"role": "assistant", "content": "Look."}
    turns = messages([user({"type": "input_text", "text": "hi"}), *items, said, said], ToolNames())
    assert len(turns[1].tool_calls) == 300
    assert turns[1].text == "Look.\n\nLook."
    assert len(made) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "king", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"content": "hi"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [user(IMAGE)]}, "input[0].content"),
        ({"input": [user({"type": []})]}, "input[0].content[0].type"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [1]}]},
            "tools[0].tools[0]",
        ),
        ({"input": "hi", "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "background": True}, "background"),
    ],
)
def test_what_cannot_work_is_named(scripted: Scripted, body: dict[str, Any], param: str) -> None:
    answer = scripted.http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error


def test_an_image_of_the_past_is_noted(scripted: Scripted) -> None:
    whole(scripted.http, {"input": [user(say("look"), IMAGE), user(say("never mind"))]})
    assert "look\n[image omitted]" in scripted.prompt()


def test_a_wish_for_json_is_put_into_words(scripted: Scripted) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "title": "Cat"}}
    made = whole(scripted.http, {"input": "hi", "text": {"format": form}})
    assert '"title": "Cat"' in scripted.prompt()
    assert made["text"] == {"format": form}


def test_effort_none_switches_thinking_off(scripted: Scripted) -> None:
    def thinks(**reasoning: str) -> bool:
        body = {"input": "hi", "reasoning": reasoning}
        scripted.http.post("/v1/responses", json=body).raise_for_status()
        return "<think>" in scripted.prompt()

    assert not thinks(effort="none")
    assert thinks(effort="low")


@pytest.mark.parametrize("choice", ["none", "required", "auto"])
def test_the_prompt_is_the_same_for_every_tool_choice(scripted: Scripted, choice: str) -> None:
    tools = [{"type": "function", "name": "act", "parameters": {"type": "object"}}]
    body = {"input": "hi", "tools": tools, "tool_choice": choice}
    assert whole(scripted.http, body)["tool_choice"] == choice
    assert ("<tool_call>" in scripted.prompt().rpartition("assistant")[2]) is (choice == "required")


def test_allowed_tools_follow_their_mode(scripted: Scripted) -> None:
    tools = [{"type": "function", "name": "act", "parameters": {"type": "object"}}]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "act"}],
    }
    whole(scripted.http, {"input": "hi", "tools": tools, "tool_choice": choice})
    assert scripted.prompt().endswith("<tool_call>")


def test_logprobs_come_when_included(scripted: Scripted) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole(scripted.http, body)
    assert scripted.engine.asked[-1].sampling.top_logprobs == 2
    whole(scripted.http, {"input": "hi"})
    assert scripted.engine.asked[-1].sampling.top_logprobs is None


def test_r4_input_tokens_are_those_of_the_response(scripted: Scripted) -> None:
    body = {**PLAIN, "input": HISTORY, "instructions": "Be kind."}
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        counted = scripted.http.post(path, json=body)
        assert counted.status_code == 200, counted.text
        used = whole(scripted.http, body)["usage"]["input_tokens"]
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}


def test_r4_the_sdk_counts(scripted: Scripted) -> None:
    assert scripted.sdk.responses.input_tokens.count(model="m", input="hi").input_tokens > 0


def test_the_alias_without_v1(scripted: Scripted) -> None:
    answer = scripted.http.post("/responses", json={"input": "hi", **PLAIN})
    assert answer.json()["object"] == "response"
    assert "error" in scripted.http.post("/responses", json={}).json()


def test_context_length_exceeded_is_final(scripted: Scripted) -> None:
    """Codex looks for this code and gives up instead of trying again."""
    for stream in (False, True):
        answer = scripted.http.post(
            "/v1/responses", json={"input": "word " * 20000, "stream": stream}
        )
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.sdk.responses.create(model="m", input="word " * 20000)
    assert caught.value.code == "context_length_exceeded"


def test_an_earlier_response_is_refused_by_its_code(scripted: Scripted) -> None:
    """VS Code, Roo and proxies look for code or words, and send the whole input."""
    with pytest.raises(
        openai.BadRequestError, match="Previous response with id 'resp_1' not f"
    ) as no:
        scripted.sdk.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert no.value.code == "previous_response_not_found"
    items: list[Any] = [{"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(openai.BadRequestError, match="Item with id 'msg_1' not found"):
        scripted.sdk.responses.create(model="m", input=items)


SHELL: dict[str, Any] = {"commands": ["ls"], "timeout_ms": 9}
DONE: dict[str, Any] = {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
PATCH: dict[str, Any] = {"type": "update_file", "path": "a.py", "diff": "@@"}


def test_calls_of_shell_and_apply_patch_are_kept_with_their_outputs() -> None:
    items = [
        called("c1", "shell_call", action=SHELL),
        called("c1", "shell_call_output", output=[DONE]),
        called("c2", "apply_patch_call", operation=PATCH),
        called("c2", "apply_patch_call_output", status="failed", output="no such line"),
    ]
    shell, listed, patch, refused = messages(items, ToolNames())
    assert [(call.name, call.arguments) for call in shell.tool_calls] == [("shell", SHELL)]
    assert (listed.tool_call_id, msgspec.json.decode(listed.text)) == ("c1", [DONE])
    assert [(call.name, call.arguments) for call in patch.tool_calls] == [("apply_patch", PATCH)]
    assert (refused.tool_call_id, refused.text) == ("c2", "failed\nno such line")


def test_a_call_without_its_action_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="operation: Field required"):
        messages([called("c", "apply_patch_call")], ToolNames())


def test_an_empty_field_of_another_type_of_item_is_no_fault() -> None:
    names = ("id", "status", "name", "input", "output", "action", "arguments", "tools")
    said = {"type": "custom_tool_call", "name": "patch", "call_id": "c", "input": None}
    items = [{"role": "user", "content": "Hi.", **dict.fromkeys(names)}, said]
    asked, called = messages(items, ToolNames())
    assert (asked.text, called.tool_calls[0].arguments) == ("Hi.", {INPUT: ""})


def test_a_summary_stands_for_reasoning_that_is_not_readable() -> None:
    summary = [{"type": "summary_text", "text": "Look first."}]
    items = [
        {"type": "reasoning", "summary": summary, "encrypted_content": "of another service"},
        {"type": "message", "role": "assistant", "content": "Hello."},
    ]
    (turn,) = messages(items, ToolNames())
    assert turn.reasoning == "Look first."


HOSTED = [
    (
        {"type": "mcp_call", "name": "wiki", "server_label": "w", "arguments": '{"q": "owl"}'},
        "wiki",
    ),
    ({"type": "web_search_call", "action": {"type": "search", "q": "owl"}}, "web_search"),
    ({"type": "file_search_call", "queries": ["owl"]}, "file_search"),
    ({"type": "code_interpreter_call", "code": "owl"}, "code_interpreter"),
]


@pytest.mark.parametrize(("item", "name"), HOSTED)
def test_a_call_of_openais_servers_is_kept_with_its_result(item: dict[str, Any], name: str) -> None:
    kept = {**item, "id": "h1", "status": "completed"}
    results = ({"output": "hoo"}, {"results": [{"text": "hoo"}]}, {"error": "hoo"})
    for result in results:
        _, calling, told = _asking(kept | result)
        (call,) = calling.tool_calls
        assert (call.name, "owl" in str(call.arguments)) == (name, True)
        assert (told.tool_call_id, "hoo" in told.text) == (call.id, True)
    _, _, told = _asking(kept)
    assert told.text == "completed"


def test_a_field_has_other_types_in_other_items() -> None:
    """`action` is an object in most items; a refusal would stay in the history of the client."""
    drawn = {"type": "image_generation_call", "id": "h1", "result": "AAAA", "action": "generate"}
    _, calling, told = _asking({**drawn, "status": "completed"})
    assert (calling.tool_calls[0].name, told.text) == ("image_generation", "completed")
    foreign = {"action": "x", "actions": 1, "operation": "x", "queries": "x", "code": 5}
    plain = _asking(called("c1", name="act", arguments="{}"))
    same = _asking(called("c1", name="act", arguments="{}", **foreign))
    assert same == plain


def test_a_call_of_a_computer_is_kept_without_its_picture() -> None:
    shown = {"type": "computer_screenshot", "image_url": IMAGE["image_url"]}
    _, calling, told = _asking(
        called("c1", "computer_call", actions=[{"type": "click", "x": 3}]),
        called("c1", "computer_call_output", output=shown),
    )
    (call,) = calling.tool_calls
    assert (call.name, call.arguments) == ("computer", {"actions": [{"type": "click", "x": 3}]})
    assert (told.tool_call_id, told.text) == ("c1", "[image omitted]")


def approval(*, is_approved: bool, **more: Any) -> list[dict[str, Any]]:
    """Request of approval for a call of an MCP server, and the answer of the user."""
    asked = {"type": "mcp_approval_request", "id": "r1", "name": "wiki", "arguments": '{"q": 1}'}
    answer = {"type": "mcp_approval_response", "approval_request_id": "r1", "approve": is_approved}
    return [{**asked, "server_label": "w"}, answer | more]


@pytest.mark.parametrize(
    ("is_approved", "more", "told"),
    [
        (True, {}, "approved, but not run here"),
        (False, {}, "denied by the user"),
        (False, {"reason": "costs money"}, "denied by the user: costs money"),
    ],
)
def test_an_approval_is_the_result_of_the_call_that_waits_for_it(
    is_approved: bool, more: dict[str, Any], told: str
) -> None:
    _, calling, answer = _asking(*approval(is_approved=is_approved, **more))
    (call,) = calling.tool_calls
    assert (call.id, call.name, call.arguments) == ("r1", "wiki", {"q": 1})
    assert (answer.tool_call_id, answer.text) == ("r1", told)


def test_an_approval_is_left_out_where_its_call_follows() -> None:
    item = {"type": "mcp_call", "id": "m1", "name": "wiki", "arguments": "{}", "output": "hoo"}
    _, calling, told = _asking(
        *approval(is_approved=True), {**item, "approval_request_id": "r1", "server_label": "w"}
    )
    assert [call.id for call in calling.tool_calls] == ["m1"]
    assert told.text == "hoo"


@pytest.mark.parametrize(
    "kind",
    ["compaction", "compaction_summary", "context_compaction", "compaction_trigger", "program"],
)
def test_an_item_that_only_openai_can_read_is_refused(scripted: Scripted, kind: str) -> None:
    sent = [user(say("one")), {"type": kind, "id": "x"}, user(say("two"))]
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.sdk.responses.create(model="x", input=sent)
    assert refused.value.param == "input[1].type"
    assert kind in str(refused.value)


def _asking(*items: dict[str, Any]) -> tuple[Any, ...]:
    return messages([user(say("look")), *items], ToolNames())
