"""Shapes of bodies that clients send and no specification has: read as what they mean."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import Struct

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
    (CHAT, {"input": "hi"}, "/v1/responses"),
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


def test_contents_of_ollama_may_be_parts(prompts: Prompts) -> None:
    def said(*contents: Any) -> str:
        turns = [{"role": "user", "content": content} for content in contents]
        return prompts.of("/api/chat", {"messages": turns, "stream": False})

    assert said([text("Weather"), text("in Rome?")], "now") == said("Weather\nin Rome?", "now")


def test_no_arguments_may_be_an_empty_list(prompts: Prompts) -> None:
    """PHP and Lua write an empty table so."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "SUNNY"}
    sent = {"messages": [ASKED, calling(called("c1", arguments=[])), result]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": []}
    output = {"type": "function_call_output", "call_id": "c1", "output": "SUNNY"}
    for path, body in ((CHAT, sent), ("/v1/responses", {"input": [ASKED, call, output]})):
        assert "SUNNY" in prompts.of(path, body)


def test_a_last_message_with_a_prefix_is_continued(prompts: Prompts) -> None:
    begun = {"role": "assistant", "content": "The sky is"}
    plain = {"messages": [ASKED, begun], "continue_final_message": True}
    body = {"messages": [ASKED, {**begun, "prefix": True}]}
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
