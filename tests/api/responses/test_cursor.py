"""Bodies of the Responses API at the path of chats, as Cursor sends them there.

The shapes are those of public reports: forum.cursor.com 153019 and 159298, BerriAI/litellm#34029,
icebear0828/codex-proxy#707 and #708.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxstack.core.preset import ServerSpec
from tests import vision_models
from tests.api.requests import PLAIN
from tests.api.responses.conftest import Scripted
from tests.api.running import running, tiny_preset
from tests.api.test_served_images import png
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
}
READ_FILE: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a file",
    "parameters": PARAMETERS,
}
FLAT: dict[str, Any] = {"type": "function", **READ_FILE}
GRAMMAR: dict[str, Any] = {
    "type": "grammar",
    "syntax": "lark",
    "definition": "start: begin\nbegin: /[a-z\\n]+/",
}
APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "ApplyPatch",
    "description": "Edit",
    "format": GRAMMAR,
}
PATCH = "*** Begin Patch\n+one"
ASKED: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "fix the bug"}]}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "read_file",
    "arguments": '{"path":"a.ts"}',
}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_1", "output": "source"}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": "You are a coding agent."},
    {"type": "message", **ASKED},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
    CALL,
    OUTPUT,
]
BODY: dict[str, Any] = {
    "model": "gpt-5.5",
    "input": ITEMS,
    "tools": [FLAT, APPLY_PATCH],
    "tool_choice": "auto",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "prompt_cache_retention": "24h",
    "previous_response_id": None,
    "truncation": "disabled",
    "user": "google-oauth2|1",
    "metadata": {"cursorConversationId": "c"},
    "stream_options": {"include_usage": True},
}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def whole(scripted: Scripted, body: dict[str, Any], **more: Any) -> ChatCompletion:
    answer = scripted.http.post(CHAT, json={**PLAIN, **body}, **more)
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate_json(answer.text, strict=True)


def streamed(sdk: openai.OpenAI, body: dict[str, Any]) -> list[ChatCompletionChunk]:
    """Chunks of a body that the SDK would not send itself."""
    stream = sdk.post(
        "/chat/completions",
        body={**PLAIN, **body, "stream": True},
        cast_to=ChatCompletionChunk,
        stream=True,
        stream_cls=openai.Stream[ChatCompletionChunk],
    )
    chunks = list(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(json.loads(chunk.model_dump_json(exclude_unset=True)))
        assert chunk.object == "chat.completion.chunk"
    return chunks


def prompt_of(scripted: Scripted, path: str, body: dict[str, Any]) -> str:
    answer = scripted.http.post(path, json={**PLAIN, **body})
    assert answer.status_code == 200, answer.text
    return scripted.prompt()


def test_the_prompt_is_that_of_the_responses_api(scripted: Scripted) -> None:
    prompt = prompt_of(scripted, CHAT, BODY)
    assert prompt == prompt_of(scripted, RESPONSES, BODY)
    for text in ("You are a coding agent.", "fix the bug", '"path"', "source", "ApplyPatch"):
        assert text in prompt
    counted = scripted.http.post(f"{CHAT}/input_tokens", json={**PLAIN, **BODY}).json()
    usage = whole(scripted, BODY).usage
    assert usage is not None and counted["input_tokens"] == usage.prompt_tokens


def test_the_answer_is_that_of_a_chat(scripted: Scripted) -> None:
    answer = whole(scripted, BODY)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "Hello."
    chunks = streamed(scripted.sdk, BODY)
    said = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(filter(None, said)) == "Hello."
    assert chunks[-1].usage is not None, "stream_options are those of a chat"


@pytest.mark.parametrize("key", ["/chat/completions", "/v1/batch/chat/completions"])
def test_every_path_of_chats_takes_items(scripted: Scripted, key: str) -> None:
    answer = scripted.http.post(key, json={**PLAIN, **BODY})
    assert answer.json()["object"] == "chat.completion"


CHOICES: list[Any] = [
    "required",
    {"type": "function", "name": "read_file"},
    {"type": "function", "function": {"name": "read_file"}},
    {"type": "allowed_tools", "mode": "required", "tools": [FLAT]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=["word", "flat", "nested", "allowed"])
def test_a_function_is_called(scripted: Scripted, choice: Any) -> None:
    scripted.say(called("read_file", path="b.ts"))
    body = {**BODY, "tool_choice": choice}
    (call,) = whole(scripted, body).choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("read_file", '{"path":"b.ts"}')
    chunks = streamed(scripted.sdk, body)
    deltas = [d for c in chunks for choice in c.choices for d in choice.delta.tool_calls or ()]
    assert [d.function.name for d in deltas if d.function and d.function.name] == ["read_file"]
    pieces = [d.function.arguments or "" for d in deltas if d.function]
    assert json.loads("".join(pieces)) == {"path": "b.ts"}
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"


@pytest.mark.parametrize(
    "tool",
    [
        APPLY_PATCH,
        {"type": "custom", "custom": {"name": "ApplyPatch", "format": GRAMMAR}},
        {"type": "custom", "custom": {"name": "ApplyPatch", "format": {"grammar": GRAMMAR}}},
    ],
    ids=["flat", "nested", "grammar nested too"],
)
def test_a_custom_tool_is_called_as_a_function_with_its_input(
    scripted: Scripted, tool: dict[str, Any]
) -> None:
    """Cursor looks for each call in `function`, and gives the arguments to its tool as they are."""
    scripted.say(called("ApplyPatch", input=PATCH))
    body = {**BODY, "tools": [FLAT, tool]}
    (call,) = whole(scripted, body).choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("ApplyPatch", PATCH)
    chunks = streamed(scripted.sdk, body)
    deltas = [d for c in chunks for choice in c.choices for d in choice.delta.tool_calls or ()]
    assert deltas[0].type == "function"
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == PATCH
    assert "start: begin" in scripted.prompt()


def test_the_input_of_a_custom_tool_comes_back_in_any_form(scripted: Scripted) -> None:
    """The same prompt, so that nothing of it is computed again."""
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"}
    own = {"call_id": "c", "name": "ApplyPatch"}
    inner = {"name": "ApplyPatch", "arguments": PATCH}
    function = {"id": "c", "type": "function", "function": inner}
    said = {"role": "assistant", "content": None, "tool_calls": [function]}
    prompts = {
        prompt_of(scripted, CHAT, {**BODY, "input": [ASKED, *items]})
        for items in (
            [{"type": "custom_tool_call", **own, "input": PATCH}, output],
            [{"type": "function_call", **own, "arguments": PATCH}, output],
            [{"type": "function_call", **own, "arguments": json.dumps({"input": PATCH})}, output],
            [said, {"role": "tool", "tool_call_id": "c", "content": "Done!"}],
        )
    }
    messages = [
        {"role": "user", "content": "fix the bug"},
        said,
        {"role": "tool", "tool_call_id": "c", "content": "Done!"},
    ]
    chat = {**BODY, "messages": messages}
    del chat["input"]
    prompts.add(prompt_of(scripted, CHAT, chat))
    assert len(prompts) == 1


def test_messages_with_a_custom_tool_are_answered_as_chats_are_but_for_cursor(
    scripted: Scripted,
) -> None:
    scripted.say(called("ApplyPatch", input=PATCH))
    body = {"messages": [ASKED], "tools": [APPLY_PATCH], "tool_choice": "required"}
    (call,) = whole(scripted, body).choices[0].message.tool_calls or ()
    assert call.type == "custom"
    headers = {"user-agent": "Cursor/3.14.27"}
    (call,) = whole(scripted, body, headers=headers).choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.arguments == PATCH


def test_items_may_stand_among_messages(scripted: Scripted) -> None:
    """And flat tools, and a flat choice of one, beside them."""
    rest = {name: value for name, value in BODY.items() if name != "input"}
    body = {**rest, "tool_choice": {"type": "function", "name": "read_file"}}
    mixed = {**body, "messages": ITEMS}
    scripted.say(called("read_file", path="b.ts"))
    assert prompt_of(scripted, CHAT, mixed) == prompt_of(
        scripted, RESPONSES, {**body, "input": ITEMS}
    )
    assert whole(scripted, mixed).choices[0].finish_reason == "tool_calls"


def test_messages_may_have_fields_of_the_responses_api(scripted: Scripted) -> None:
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}}
    form = {"type": "json_schema", "name": "sky", "schema": schema}
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "instructions": "Be kind.", "text": {"format": form}}
    plain = {
        "messages": [{"role": "system", "content": "Be kind."}, *messages],
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    assert prompt_of(scripted, CHAT, body) == prompt_of(scripted, CHAT, plain)
    whole(scripted, {"messages": messages, "max_output_tokens": 7})
    assert scripted.engine.asked[-1].max_tokens == 7


def test_the_system_of_anthropics_api_counts(scripted: Scripted) -> None:
    """Cursor sends such bodies for models with a name of Anthropic's."""
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": "hi"}]
    plain = {"messages": [{"role": "system", "content": "Be kind."}, *messages]}
    prompt = prompt_of(scripted, CHAT, plain)
    assert prompt_of(scripted, CHAT, {"system": system, "messages": messages}) == prompt
    assert prompt_of(scripted, CHAT, {"system": "Be kind.", "input": messages}) == prompt


def test_items_may_have_fields_of_chats(scripted: Scripted) -> None:
    whole(
        scripted, {"input": "hi", "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 2}
    )
    asked = scripted.engine.asked[-1]
    assert (asked.max_tokens, asked.sampling.top_logprobs) == (7, 2)
    quiet = {"input": "hi", "chat_template_kwargs": None, "reasoning_effort": "none"}
    wanted = {"input": "hi", "chat_template_kwargs": None, "reasoning": {"effort": "none"}}
    assert prompt_of(scripted, CHAT, quiet) == prompt_of(scripted, RESPONSES, wanted)
    two = whole(scripted, {"input": "hi", "n": 2})
    assert [choice.index for choice in two.choices] == [0, 1]


def test_calls_of_other_apis_may_be_parts_of_items(scripted: Scripted) -> None:
    """Cursor has Anthropic's parts in them for models with its names."""
    use = {"type": "tool_use", "id": "call_1", "name": "read_file", "input": {"path": "a.ts"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "source"}
    tool = {"name": "read_file", "description": "Read a file", "input_schema": PARAMETERS}
    typed = {"type": "custom", **tool}
    items = [ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    sent = {"input": items, "tools": [tool]}
    wanted = {"input": [ASKED, CALL, OUTPUT], "tools": [FLAT]}
    prompt = prompt_of(scripted, RESPONSES, wanted)
    assert prompt_of(scripted, CHAT, sent) == prompt
    assert prompt_of(scripted, RESPONSES, sent) == prompt
    assert prompt_of(scripted, CHAT, {**sent, "tools": [typed]}) == prompt
    chat = {"messages": items, "tools": [typed]}
    assert prompt_of(scripted, CHAT, chat) == prompt
    part = {
        "type": "tool-result",
        "toolCallId": "call_1",
        "output": {"type": "text", "value": "source"},
    }
    again = [*items[:2], {"role": "tool", "content": [part]}]
    assert prompt_of(scripted, CHAT, {**sent, "input": again}) == prompt


def test_messages_of_chats_are_whole_among_items(scripted: Scripted) -> None:
    """Also their reasoning and older calls."""
    function = {"name": "read_file", "arguments": '{"path":"a.ts"}'}
    said = {"role": "assistant", "content": "Look.", "reasoning_content": "Hm."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    answer = {"role": "assistant", "content": "Look."}
    for items, wanted in (
        ([ASKED, said, CALL, OUTPUT], [ASKED, thought, answer, CALL, OUTPUT]),
        (
            [
                ASKED,
                {"role": "assistant", "content": None, "function_call": function},
                CALL,
                OUTPUT,
            ],
            [ASKED, {**CALL, "call_id": ""}, CALL, OUTPUT],
        ),
    ):
        prompt = prompt_of(scripted, RESPONSES, {"input": wanted})
        assert prompt_of(scripted, CHAT, {"messages": items}) == prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "king", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": 7}, "input"),
    ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "hi", "tool_choice": "sometimes"}, "tool_choice"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "hi", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"input": "hi", "background": True}, "background"),
    ({"input": "hi", "store": "yes"}, "store"),
    ({"input": "hi", "functions": [READ_FILE]}, "functions"),
    ({"input": []}, "input"),
    ({"messages": [ASKED, {"type": "function_call", "call_id": "c"}]}, "messages[1].name"),
    ({"messages": [ASKED, {"type": "text", "text": "hi"}]}, "messages[1].role"),
    ({"messages": []}, "messages"),
    ({"prompt": "hi"}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_those_of_chats(
    scripted: Scripted, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = scripted.http.post(CHAT, json={**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.partition("[")[0] in error["message"]


def test_input_beside_messages_is_ignored(http: httpx.Client) -> None:
    body = {**PLAIN, "messages": [ASKED], "max_tokens": 1}
    plain, both = (
        http.post(CHAT, json=sent).raise_for_status().json()
        for sent in (body, {**body, "input": "hi", "prompt": "hi"})
    )
    assert both["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert both["choices"][0]["message"] == plain["choices"][0]["message"]


def test_an_unknown_response_is_named(scripted: Scripted) -> None:
    answer = scripted.http.post(CHAT, json={"input": "hi", "previous_response_id": "resp_1"})
    assert answer.json()["error"]["param"] == "previous_response_id"


def test_a_real_model_answers_in_chunks(sdk: openai.OpenAI, http: httpx.Client) -> None:
    body = {**BODY, "max_output_tokens": 6, "ignore_eos": True, "user": None}
    chunks = streamed(sdk, body)
    said = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 6
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    answer = http.post(CHAT, json={**PLAIN, **body}).json()
    assert answer["choices"][0]["message"]["content"] == "".join(filter(None, said))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a tiny model that sees."""
    folder = vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")
    preset = tiny_preset(folder, server=ServerSpec(port=0))
    with (
        running(preset, tmp_path_factory.mktemp("home")) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def test_images_of_items_are_seen(seeing: httpx.Client) -> None:
    url = f"data:image/png;base64,{png(1)}"
    text = {"type": "input_text", "text": "What is it?"}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}, text]}
    shown = {"type": "image_url", "image_url": {"url": url}}
    message = {"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}
    sizes = set[int]()
    for body in ({"input": [item]}, {"messages": [message]}):
        answer = seeing.post(CHAT, json={**PLAIN, **body, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        sizes.add(answer.json()["usage"]["prompt_tokens"])
    assert len(sizes) == 1
    blind = {"input": [{"role": "user", "content": [text]}]}
    counted = seeing.post(CHAT, json={**PLAIN, **blind, "max_tokens": 1}).json()
    assert counted["usage"]["prompt_tokens"] < min(sizes)
    gone = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png"}]}]
    refused = seeing.post(CHAT, json={"input": gone}).json()["error"]
    assert refused["param"] == "input[0].content[0]"
