"""Shapes of bodies that clients send and no specification has: read as what they mean."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Struct

from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import thinking_budget
from tests.api.running import answering
from tests.service.standin import StandIn

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
ASKED = {"role": "user", "content": "Weather in Rome?"}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


class Prompts(Struct):
    """Prompts that the engine is given."""

    engine: StandIn
    http: httpx.Client

    def of(self, path: str, body: dict[str, Any]) -> str:
        """The prompt of a body."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return str(self.engine.tokenizer.decode(list(self.engine.asked[-1].tokens)))


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    with answering() as (engine, http):
        yield Prompts(engine, http)


def calling(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def called(key: str, **function: Any) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": "weather", **function}}


def test_calls_and_results_may_be_parts_of_contents(prompts: Prompts) -> None:
    """Cursor writes them into the content, as the Messages API has them."""
    city = {"city": "Rome"}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": city}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("SUNNY")]}
    cursor = [
        ASKED,
        {"role": "assistant", "content": [text("I look."), use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{**use, "id": "c2"}]},
        {"role": "user", "content": [{**result, "tool_use_id": "c2"}, text("And now?")]},
    ]
    first, second = (called(key, arguments=json.dumps(city)) for key in ("c1", "c2"))
    plain = [
        ASKED,
        calling(first, text="I look."),
        {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"},
        calling(second),
        {"role": "tool", "tool_call_id": "c2", "content": "SUNNY"},
        {"role": "user", "content": "And now?"},
    ]
    prompt = prompts.of(CHAT, {"messages": cursor})
    assert prompt == prompts.of(CHAT, {"messages": plain})
    assert prompt.count("SUNNY") == 2


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


RESULTS: list[Any] = [
    *({"sky": "blue", "t": [1, None]}, 21.5, 7, True),
    *([], [1, 2], [{"city": "Rome"}, {"city": "Ulm"}]),
    [{"type": "directory", "name": "src"}, {"type": "file", "name": "a.py"}],
    [{"type": "resource", "resource": {"uri": "file:///a", "text": "x"}}, {"text": "y"}],
]


@pytest.mark.parametrize("value", RESULTS)
def test_the_result_of_a_tool_may_be_any_json(prompts: Prompts, value: Any) -> None:
    """Frameworks send what a tool returned; a refusal would end the session for good."""

    def chat(content: Any) -> dict[str, Any]:
        result = {"role": "tool", "tool_call_id": "c1", "content": content}
        return {"messages": [ASKED, calling(called("c1", arguments="{}")), result]}

    def responses(output: Any) -> dict[str, Any]:
        call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c1", "output": output}
        return {"input": [ASKED, call, result]}

    def messages(content: Any) -> dict[str, Any]:
        use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return {"max_tokens": 9, "messages": [ASKED, *turns]}

    def ollama(content: Any) -> dict[str, Any]:
        return {**chat(content), "stream": False}

    for path, body in (
        *((CHAT, chat), ("/v1/responses", responses)),
        *(("/v1/messages", messages), ("/api/chat", ollama)),
    ):
        assert prompts.of(path, body(value)) == prompts.of(path, body(json.dumps(value)))


def test_a_tool_message_of_the_chat_api_is_an_output(prompts: Prompts) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "SUNNY"}
    message = {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}
    said = [prompts.of("/v1/responses", {"input": [ASKED, call, one]}) for one in (output, message)]
    assert said[0] == said[1]


def test_only_results_may_be_any_json(prompts: Prompts) -> None:
    for role in ("user", "assistant", "system"):
        body = {"messages": [{"role": role, "content": {"a": 1}}, ASKED]}
        refused = prompts.http.post(CHAT, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[0].content"


def test_nulls_are_as_absent(prompts: Prompts) -> None:
    nameless = {"id": "c1", "type": None, "function": {"name": None, "arguments": None}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}
    tool = {"type": None, "function": {"name": "weather", "description": None}}
    for form in ({}, {"type": None}, {"type": "text"}):
        body = {"response_format": form, "tools": [tool]}
        body["messages"] = [ASKED, calling(nameless), result]
        assert "SUNNY" in prompts.of(CHAT, body)


@pytest.mark.parametrize(("block", "note"), [(PDF, "document"), (IMAGE, "image")])
def test_what_a_tool_brings_along_is_not_refused(
    prompts: Prompts, block: dict[str, Any], note: str
) -> None:
    """Claude Code sends a PDF that the model read beside the result of its call."""
    use = {"type": "tool_use", "id": "c1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "PDF read"}
    turns = [ASKED, {"role": "assistant", "content": [use]}]
    body = {"max_tokens": 9, "messages": [*turns, {"role": "user", "content": [result, block]}]}
    assert f"[{note} omitted]" in prompts.of("/v1/messages", body)
    sent = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    refused = prompts.http.post("/v1/messages", json=sent)
    assert refused.status_code == 400
    assert note in refused.json()["error"]["message"]


@pytest.mark.parametrize("switch", [True, False])
def test_thinking_is_switched_in_every_spelling(prompts: Prompts, switch: bool) -> None:
    """The fields of z.ai, DeepSeek and Qwen, which clients send to every server of their kind."""
    body = {"messages": [ASKED]}
    wanted = prompts.of(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": switch}})
    word = "enabled" if switch else "disabled"
    for more in ({"thinking": {"type": word}}, {"thinking": switch}, {"enable_thinking": switch}):
        assert prompts.of(CHAT, body | more) == wanted, more
        own = {"chat_template_kwargs": {"enable_thinking": not switch}}
        assert prompts.of(CHAT, body | more | own) != wanted, "the variable of the template wins"


SWITCHES: list[tuple[dict[str, Any], bool]] = [
    ({"reasoning": False}, False),
    ({"reasoning": {"enabled": False}}, False),
    ({"reasoning": {"enabled": True, "effort": "low"}}, True),
    ({"reasoning": {"effort": "none"}}, False),
    ({"think": True}, True),
    ({"think": "none"}, False),
    ({"reasoning": "none"}, False),
    ({"reasoning_effort": {"effort": "none", "summary": "auto"}}, False),
    ({"reasoning": None, "think": None, "enable_thinking": False}, False),
]


@pytest.mark.parametrize(("sent", "switch"), SWITCHES)
def test_thinking_is_switched_as_openrouter_and_ollama_do(
    prompts: Prompts, sent: dict[str, Any], switch: bool
) -> None:
    body = {"messages": [ASKED]}
    wanted = prompts.of(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": switch}})
    assert prompts.of(CHAT, body | sent) == wanted


MISPLACED = [
    (CHAT, {"prompt": "hi"}, "/v1/completions"),
    ("/v1/responses", {"messages": [ASKED]}, "/v1/chat/completions"),
    ("/v1/completions", {"messages": [ASKED]}, "/v1/chat/completions"),
    ("/completion", {"messages": [ASKED]}, "/v1/chat/completions"),
    ("/v1/messages", {"input": "hi", "max_tokens": 9}, "/v1/responses"),
]


@pytest.mark.parametrize(("path", "body", "other"), MISPLACED)
def test_a_body_of_another_path_is_refused_with_that_path(
    prompts: Prompts, path: str, body: dict[str, Any], other: str
) -> None:
    refused = prompts.http.post(path, json=body)
    assert refused.status_code == 400
    assert other in refused.json()["error"]["message"]


SCHEMA = {"type": "object", "properties": {"sky": {"type": "string"}}}


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"name": "sky", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": None, "schema": SCHEMA},
        {"json_schema": {"name": "sky", "strict": True}, "schema": SCHEMA},
    ],
)
def test_a_schema_counts_wherever_it_stands(prompts: Prompts, form: dict[str, Any]) -> None:
    """A schema that is not found leaves the answer free without a word."""
    kind = {"type": "json_schema"}
    for path, body in (
        (CHAT, {"messages": [ASKED], "response_format": kind | form}),
        ("/v1/responses", {"input": [ASKED], "text": {"format": kind | form}}),
    ):
        assert json.dumps(SCHEMA) in prompts.of(path, body)


def test_a_schema_that_is_none_is_refused(prompts: Prompts) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": "object"}}
    refused = prompts.http.post(CHAT, json={"messages": [ASKED], "response_format": form})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    "more", [{"logprobs": False, "top_logprobs": 0}, {"stop": [None]}, {"stop": ["", None, "x"]}]
)
def test_fields_that_say_nothing_are_not_refused(prompts: Prompts, more: dict[str, Any]) -> None:
    assert prompts.of(CHAT, {"messages": [ASKED]} | more)


CONTENTS = [
    [{"type": "text", "text": {"value": "Rome", "annotations": []}}],
    [{"type": "text", "content": "Rome"}],
    [{"type": "text", "text": None}, "Rome"],
]


@pytest.mark.parametrize("content", CONTENTS)
def test_the_text_of_a_part_counts_in_every_spelling(prompts: Prompts, content: list[Any]) -> None:
    for path, more in ((CHAT, {}), ("/v1/messages", {"max_tokens": 9})):
        if path == CHAT or isinstance(content[-1], str):
            sent = {"messages": [{"role": "user", "content": content}], **more}
            assert "user\nRome<" in prompts.of(path, sent).replace("\n\n", "\n")


def test_a_refusal_is_what_the_assistant_said(prompts: Prompts) -> None:
    said = {"role": "assistant", "content": None, "refusal": "No."}
    assert "No." in prompts.of(CHAT, {"messages": [ASKED, said, ASKED]})


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "reasoning_details"])
@pytest.mark.parametrize("value", [{}, [], {"content": "hm"}, [{"text": "hm"}], "hm"])
def test_reasoning_of_the_past_is_never_refused(prompts: Prompts, field: str, value: Any) -> None:
    """It stays in the history, where a refusal would end the session for good."""
    assert prompts.of(CHAT, {"messages": [ASKED, {**calling(text="x"), field: value}, ASKED]})


def test_contents_of_ollama_may_be_parts(prompts: Prompts) -> None:
    def said(*contents: Any) -> str:
        turns = [{"role": "user", "content": content} for content in contents]
        return prompts.of("/api/chat", {"messages": turns, "stream": False})

    assert said([text("Weather"), text("in Rome?")], "now") == said("Weather\nin Rome?", "now")


def test_a_result_of_ollama_may_be_json_beside_images(prompts: Prompts) -> None:
    def answered(content: Any) -> str:
        result = {"role": "tool", "content": content, "images": ["iVBORw0KGgo="]}
        turns = [ASKED, calling(called("c1", arguments="{}")), result]
        return prompts.of("/api/chat", {"messages": turns, "stream": False})

    assert answered({"sky": "blue"}) == answered('{"sky": "blue"}')
    assert '{"sky": "blue"}' in answered({"sky": "blue"})


def test_no_arguments_may_be_an_empty_list(prompts: Prompts) -> None:
    """PHP and Lua write an empty table so."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}
    sent = {"messages": [ASKED, calling(called("c1", arguments=[])), result]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": []}
    output = {"type": "function_call_output", "call_id": "c1", "output": "SUNNY"}
    for path, body in ((CHAT, sent), ("/v1/responses", {"input": [ASKED, call, output]})):
        assert "SUNNY" in prompts.of(path, body)


@pytest.mark.parametrize("word", ["prefix", "partial"])
def test_a_last_message_with_a_prefix_is_continued(prompts: Prompts, word: str) -> None:
    begun = {"role": "assistant", "content": "The sky is"}
    plain = {"messages": [ASKED, begun], "continue_final_message": True}
    body = {"messages": [ASKED, {**begun, word: True}]}
    assert prompts.of(CHAT, body) == prompts.of(CHAT, plain)
    assert prompts.of(CHAT, body).endswith("The sky is")


@pytest.mark.parametrize("kind", ["web_search", "file_search", "image_generation"])
def test_the_choice_of_a_vendors_tool_says_where_it_runs(prompts: Prompts, kind: str) -> None:
    own = {"type": "function", "name": "weather"}
    body = {"input": "hi", "tools": [own, {"type": kind}], "tool_choice": {"type": kind}}
    refused = prompts.http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    assert "a vendor's servers" in refused.json()["error"]["message"]


HOSTED = [{"type": "web_search"}, {"type": "shell"}, {"type": "apply_patch"}]


def test_tools_of_responses_that_are_not_offered_are_told(prompts: Prompts) -> None:
    """Alone they are refused, as in the chat API: the model would have no hands."""
    own = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    for kind in HOSTED:
        refused = prompts.http.post("/v1/responses", json={"input": "hi", "tools": [kind]})
        assert refused.status_code == 400
        assert kind["type"] in refused.json()["error"]["message"]
    beside = prompts.http.post("/v1/responses", json={"input": "hi", "tools": [own, *HOSTED]})
    assert beside.headers["x-mlx-stack-omitted-tools"] == "web_search, shell, apply_patch"
    assert prompts.of("/v1/responses", {"input": "hi", "tools": []})


BUDGETS: list[dict[str, Any]] = [
    {"thinking_budget_tokens": 40},
    {"thinking_token_budget": 40},
    {"thinking_budget": 40},
    {"thinking": {"type": "enabled", "budget_tokens": 40}},
    {"reasoning": {"max_tokens": 40}},
    {"reasoning": {"max_tokens": 7}, "thinking_budget": 40},
]


@pytest.mark.parametrize("sent", BUDGETS)
def test_a_budget_of_thinking_counts_in_every_spelling(sent: dict[str, Any]) -> None:
    """Those of llama-server, vLLM, Qwen's cloud, Anthropic and OpenRouter."""
    assert thinking_budget(msgspec.convert({"messages": [ASKED], **sent}, ChatBody)) == 40


@pytest.mark.parametrize(
    ("sent", "n_top"),
    [
        ({"logprobs": 3}, 3),
        ({"logprobs": 1, "top_logprobs": 3}, 3),
        ({"logprobs": True}, 0),
        ({"logprobs": 0}, None),
    ],
)
def test_a_number_of_alternatives_may_stand_in_logprobs(
    prompts: Prompts, sent: dict[str, Any], n_top: int | None
) -> None:
    """mlx_lm.server has it there."""
    prompts.of(CHAT, {"messages": [ASKED], **sent})
    assert prompts.engine.asked[-1].sampling.top_logprobs == n_top


def test_an_object_without_keys_may_be_a_list(prompts: Prompts) -> None:
    """PHP writes it so, for tools without parameters."""

    def chat(schema: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [ASKED], "tools": [{"function": {**NAMED, "parameters": schema}}]}

    def flat(schema: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [ASKED], "tools": [{**NAMED, "input_schema": schema}]}

    def older(schema: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [ASKED], "functions": [{**NAMED, "parameters": schema}]}

    def responses(schema: Any) -> tuple[str, dict[str, Any]]:
        tool = {"type": "function", **NAMED, "parameters": schema}
        return "/v1/responses", {"input": [ASKED], "tools": [tool]}

    def messages(schema: Any) -> tuple[str, dict[str, Any]]:
        tool = {**NAMED, "input_schema": schema}
        return "/v1/messages", {"max_tokens": 9, "messages": [ASKED], "tools": [tool]}

    for body in (chat, flat, older, responses, messages):
        assert prompts.of(*body([])) == prompts.of(*body({}))
    path, sent = chat([1])
    assert prompts.http.post(path, json=sent).status_code == 400


NAMED = {"name": "weather", "description": "Weather of a city"}


def test_the_schema_of_a_tool_has_the_name_of_any_api(prompts: Prompts) -> None:
    """A schema that is not found leaves the model without arguments, without a word."""
    for name in ("parameters", "input_schema", "inputSchema"):
        own = {"name": "weather", name: SCHEMA}
        nested = {"type": "function", "function": own}
        for path, body in (
            *((CHAT, {"messages": [ASKED], "tools": [tool]}) for tool in (own, nested)),
            (CHAT, {"messages": [ASKED], "functions": [own]}),
            *(("/v1/responses", {"input": [ASKED], "tools": [tool]}) for tool in (own, nested)),
            ("/v1/messages", {"max_tokens": 9, "messages": [ASKED], "tools": [own]}),
        ):
            assert json.dumps(SCHEMA) in prompts.of(path, body), (path, body)


def test_a_format_counts_in_the_field_of_either_api(prompts: Prompts) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
    sent = {"input": [ASKED], "response_format": form}
    assert json.dumps(SCHEMA) in prompts.of("/v1/responses", sent)


def test_messages_have_the_common_fields(prompts: Prompts) -> None:
    sent = {"max_tokens": 9, "messages": [ASKED]}
    prompts.of("/v1/messages", {**sent, "json_schema": SCHEMA})
    assert prompts.engine.asked[-1].constraint is not None
    plain = {**sent, "thinking": {"type": "disabled"}, "stop": ["in"]}
    stopped = prompts.http.post("/v1/messages", json=plain).json()
    assert stopped["stop_sequence"] == "in"


def test_calls_of_the_chat_api_are_calls_of_responses(prompts: Prompts) -> None:
    calls = calling(called("c1", arguments='{"city": "Rome"}'), text="I look.")
    said = {"role": "assistant", "content": "I look."}
    call = {"type": "function_call", "name": "weather", "arguments": '{"city": "Rome"}'}
    output = {"type": "function_call_output", "output": "SUNNY"}
    same = [
        [ASKED, calls, {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}],
        [ASKED, said, {**call, "call_id": "c1"}, {**output, "call_id": "c1"}],
        [ASKED, said, {**call, "call_id": None, "id": "c1"}, {**output, "id": "c1"}],
    ]
    assert len({prompts.of("/v1/responses", {"input": items}) for items in same}) == 1


def test_calls_may_stand_beside_their_ids(prompts: Prompts) -> None:
    city = {"city": "Rome"}
    flat = {"id": "c1", "type": "function", "name": "weather"}
    same = [
        called("c1", arguments=json.dumps(city)),
        called("c1", arguments=json.dumps(json.dumps(city))),
        called("c1", input=city),
        {**flat, "arguments": city},
        {**flat, "args": city},
    ]
    result = {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}
    said = {prompts.of(CHAT, {"messages": [ASKED, calling(one), result]}) for one in same}
    assert len(said) == 1
    none = [called("c1", arguments=text) for text in ("{}", " ", "null", None)]
    said = {prompts.of(CHAT, {"messages": [ASKED, calling(one), result]}) for one in none}
    assert len(said) == 1


@pytest.mark.parametrize("thoughts", ["hm", ["hm"], [{"type": "summary_text", "text": "hm"}], None])
def test_reasoning_of_responses_may_be_text(prompts: Prompts, thoughts: Any) -> None:
    said = {"role": "assistant", "content": "Sunny."}
    for field in ("content", "summary"):
        item = {"type": "reasoning", "id": "rs_1", field: thoughts}
        assert prompts.of("/v1/responses", {"input": [ASKED, item, said, ASKED]})


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "item_reference"}])
def test_a_reference_needs_no_type(prompts: Prompts, kind: dict[str, Any]) -> None:
    sent = {"input": [ASKED], "store": True}
    item = prompts.http.post("/v1/responses", json=sent).json()["output"][0]
    items = [[ASKED, one, ASKED] for one in (item, {"id": item["id"], **kind})]
    assert len({prompts.of("/v1/responses", {"input": one}) for one in items}) == 1


def test_the_text_of_a_response_always_has_a_format(prompts: Prompts) -> None:
    """Some clients refuse a response without it."""
    for text in ({}, {"verbosity": "low"}, {"verbosity": "low", "format": None}):
        answer = prompts.http.post("/v1/responses", json={"input": [ASKED], "text": text}).json()
        assert answer["text"] == {**text, "format": {"type": "text"}}


@pytest.mark.parametrize("path", ["/api/v0/chat/completions", "//v1/chat/completions"])
def test_other_paths_of_chats(prompts: Prompts, path: str) -> None:
    """Zed takes LM Studio's own."""
    body = {"messages": [ASKED]}
    assert prompts.of(path, body) == prompts.of(CHAT, body)


def test_parts_that_are_left_out_leave_no_empty_lines(prompts: Prompts) -> None:
    parts = [{"type": "step-start"}, text("I look."), {"type": "redacted_thinking", "data": "x"}]
    said = [
        prompts.of(CHAT, {"messages": [ASKED, {"role": "assistant", "content": content}, ASKED]})
        for content in (parts, "I look.")
    ]
    assert said[0] == said[1]


def test_servers_that_only_anthropic_calls_are_told(prompts: Prompts) -> None:
    servers = [{"type": "url", "url": "https://example.com", "name": "docs"}]
    sent = {"max_tokens": 9, "messages": [ASKED], "mcp_servers": servers}
    for named in ({}, {"tools": [{"type": "mcp_toolset", "mcp_server_name": "docs"}]}):
        refused = prompts.http.post("/v1/messages", json={**sent, **named})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith("mcp_servers[0]: docs is an MCP server")
        assert "send its tools in tools" in message
    tools = [{**NAMED, "input_schema": {"type": "object"}}]
    beside = prompts.http.post("/v1/messages", json={**sent, "tools": tools})
    assert beside.headers["x-mlx-stack-omitted-tools"] == "docs"


@pytest.mark.parametrize(
    "more", [{"stop_sequences": [None, "x"]}, {"output_config": {"format": {"type": "text"}}}]
)
def test_messages_are_read_leniently(prompts: Prompts, more: dict[str, Any]) -> None:
    assert prompts.of("/v1/messages", {"max_tokens": 9, "messages": [ASKED], **more})


def test_a_format_that_is_not_enforced_is_refused(prompts: Prompts) -> None:
    form = {"type": "grammar"}
    for path, body in (
        (CHAT, {"messages": [ASKED], "response_format": form}),
        ("/v1/responses", {"input": [ASKED], "text": {"format": form}}),
        ("/v1/messages", {"max_tokens": 9, "messages": [ASKED], "output_config": {"format": form}}),
    ):
        refused = prompts.http.post(path, json=body)
        assert refused.status_code == 400
        assert "known are text, json_object, json_schema" in refused.json()["error"]["message"]
