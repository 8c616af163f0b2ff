"""Ollama's API: its own client against the demo model, every field by the client's types."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from packaging.version import Version
from pydantic import BaseModel

from mlxstack.api.dialects.ollama.request_schema import OllamaChatBody, OllamaMessage
from mlxstack.api.dialects.ollama.to_conversation import chat_conversation
from mlxstack.api.dialects.openai_chat.messages import FunctionParam, ToolCallParam
from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from mlxstack.text.normalize_messages import pair_results
from tests.api.running import Running
from tests.api.test_demo import WEATHER
from tests.gateway.gateway_thread import WAYS, running_behind
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

HELLO = [{"role": "user", "content": "hello"}]
# Fields that Ollama sends, and its Python client has no attributes for.
SENT_TOO = {"id", "index", "bytes", "name"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=WAYS)
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=1024),
        sampling=SamplingSpec(temperature=0, thinking=False),
        server=ServerSpec(port=0, strict_models=True),
    )
    with running_behind(request.param, preset, tmp_path_factory.mktemp("demo")) as found:
        yield found


@pytest.fixture(scope="module")
def client(demo: Running) -> Iterator[ollama.Client]:
    with ollama.Client(demo.url, timeout=PATIENCE_S) as found:
        yield found


@pytest.fixture(scope="module")
def http(demo: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url, timeout=PATIENCE_S) as found:
        yield found


def strictly(kind: type[BaseModel], sent: dict[str, Any]) -> None:
    """Validate an object strictly; fields that its type lacks are those of `SENT_TOO`."""
    parsed = kind.model_validate_json(json.dumps(sent), strict=True)
    known = {field.alias or name for name, field in kind.model_fields.items()}
    assert set(sent) - known <= SENT_TOO
    for name, field in kind.model_fields.items():
        inner = getattr(parsed, name)
        raw = sent.get(field.alias or name)
        pairs = zip(inner, raw, strict=True) if isinstance(raw, list) else [(inner, raw)]
        for one, given in pairs:
            if isinstance(one, BaseModel):
                strictly(type(one), given)


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_client_chats_whole_and_streams_the_same(client: ollama.Client) -> None:
    whole = client.chat("demo", HELLO)
    parts = list(client.chat("demo", HELLO, stream=True))
    assert whole.message.role == "assistant" and whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == whole.done_reason == "stop"
    assert whole.model == "demo" and whole.eval_count == parts[-1].eval_count
    spent = whole.prompt_eval_duration, whole.eval_duration, whole.load_duration
    assert whole.total_duration and all(one is not None for one in spent)
    assert sum(one or 0 for one in spent) <= whole.total_duration * 1.05
    assert whole.created_at and datetime.fromisoformat(whole.created_at).tzinfo is not None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"think": True},
        {"think": "low"},
        {"format": "json"},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": WEATHER},
    ],
)
@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("/api/chat", ollama.ChatResponse, {"messages": HELLO}),
        ("/api/generate", ollama.GenerateResponse, {"prompt": "hello"}),
    ],
)
def test_every_field_is_of_its_documented_type(
    http: httpx.Client, path: str, kind: type[BaseModel], said: Any, more: dict[str, Any]
) -> None:
    body = {"model": "demo:latest", **said, "options": {"num_predict": 12}, **more}
    whole = post(http, path, body)
    assert whole["model"] == "demo:latest"
    for sent in (whole, *lines(http, path, body)):
        strictly(kind, sent)
    if "logprobs" in more:
        assert len(whole["logprobs"][0]["top_logprobs"]) == 2


def test_the_client_runs_a_tool_loop(client: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat("demo", messages, tools=WEATHER)
    (call,) = first.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    streamed = list(client.chat("demo", messages, tools=WEATHER, stream=True))
    assert [call for part in streamed for call in part.message.tool_calls or ()] == [call]
    messages += [
        first.message,
        {"role": "tool", "tool_name": "get_weather", "content": "sunny, 21 degrees"},
    ]
    assert client.chat("demo", messages, tools=WEATHER).message.content


def test_a_result_without_an_id_is_of_the_call_with_its_name() -> None:
    calls = [ToolCallParam(function=FunctionParam(name)) for name in ("a", "b", "c")]
    results = [OllamaMessage("tool", f"of {name}", tool_name=name) for name in ("b", None, "c")]
    sent = [OllamaMessage("assistant", tool_calls=calls), *results]
    said, *found = pair_results(chat_conversation(OllamaChatBody(messages=sent)).messages)
    assert [one.tool_call_id for one in found] == [call.id for call in said.tool_calls]
    assert [one.text for one in found] == ["of None", "of b", "of c"]


def test_thoughts_are_apart(client: ollama.Client) -> None:
    thinking = client.chat("demo", HELLO, think=True, options={"num_predict": 60})
    assert thinking.message.thinking and thinking.message.thinking not in (
        thinking.message.content or ""
    )
    assert client.chat("demo", HELLO, think=False).message.thinking is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_binds_the_answer(client: ollama.Client, stream: bool) -> None:
    options = {"num_predict": 60}
    found: Any = client.chat("demo", HELLO, format=SCHEMA, options=options, stream=stream)
    parts = found if stream else [found]
    said = "".join(part.message.content or "" for part in parts)
    assert json.loads(said)["city"] in ("Paris", "Rome")
    prompted = client.generate("demo", "hello", format=SCHEMA, options=options)
    assert json.loads(prompted.response or "")["city"] in ("Paris", "Rome")


def test_options_reach_the_sampler(client: ollama.Client) -> None:
    whole = client.chat("demo", HELLO)
    cut = client.chat("demo", HELLO, options={"num_predict": 2, "num_ctx": 64, "mirostat": 1})
    assert (cut.eval_count, cut.done_reason) == (2, "length")
    text = whole.message.content or ""
    stopped = client.chat("demo", HELLO, options={"stop": [text[3:6]], "num_predict": -1})
    assert stopped.message.content == text[: text.index(text[3:6])]
    assert stopped.done_reason == "stop"
    hot = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "repeat_penalty": 1.1, "num_predict": 9}
    said = [
        client.generate("demo", "hello", options={**hot, "seed": seed}).response
        for seed in (1, 1, 2, 3, 4)
    ]
    assert said[0] == said[1] and len(set(said)) > 1


def test_generate_takes_a_system_prompt_or_a_raw_one(
    client: ollama.Client, http: httpx.Client
) -> None:
    system = {"role": "system", "content": "Speak."}
    asked = client.generate("demo", "hello", system="Speak.")
    assert asked.response == client.chat("demo", [system, *HELLO]).message.content
    raw = client.generate("demo", "hello", raw=True, options={"num_predict": 6})
    plain = http.post("/completion", json={"prompt": "hello", "n_predict": 6}).json()
    assert (raw.response, raw.prompt_eval_count) == (plain["content"], plain["tokens_evaluated"])


def test_an_empty_prompt_only_loads(client: ollama.Client) -> None:
    chat = client.chat("demo", [])
    prompt = client.generate("demo", keep_alive="5m")
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    assert (prompt.done, prompt.done_reason, prompt.response) == (True, "load", "")


def test_the_client_lists_and_shows(client: ollama.Client, http: httpx.Client) -> None:
    strictly(ollama.ListResponse, http.get("/api/tags").json())
    strictly(ollama.ProcessResponse, http.get("/api/ps").json())
    strictly(ollama.ShowResponse, http.post("/api/show", json={"model": "demo"}).json())
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == "demo" and listed.digest == loaded.digest
    assert listed.size == loaded.size_vram and (listed.size or 0) > 0
    n_params = http.get("/v1/models").json()["data"][0]["meta"]["n_params"]
    assert listed.details and listed.details.parameter_size == f"{n_params / 1e6:.1f}M"
    assert loaded.context_length == 1024
    assert loaded.expires_at and loaded.expires_at > datetime.now(loaded.expires_at.tzinfo)
    shown = client.show("demo:latest")
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 1024
    assert shown.capabilities == ["completion", "tools", "thinking", "vision"]
    assert shown.template == http.get("/props").json()["chat_template"]
    # Clients refuse an older Ollama.
    # Codex wants the first release that has the Responses API.
    assert Version(http.get("/api/version").json()["version"]) >= Version("0.13.4")
    assert http.head("/api/tags").status_code == 200


def test_pull_confirms_the_local_model_alone(client: ollama.Client, http: httpx.Client) -> None:
    assert client.pull("demo").status == "success"
    assert [one.status for one in client.pull("demo", stream=True)][-1] == "success"
    for sent in lines(http, "/api/pull", {"name": "demo"}):
        strictly(ollama.ProgressResponse, sent)
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="mlx-stack pull") as refused:
            list(client.pull("org/none", stream=stream))  # type: ignore[call-overload]
        assert refused.value.status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "llama3.2"}, 404, "'llama3.2' is not served here"),
        ({"messages": HELLO * 900}, 400, "its context holds 1024"),
        ({"think": "deeply"}, 400, "think is 'deeply'"),
        ({"format": "xml"}, 400, "format is 'xml'"),
        ({"options": {"top_p": 3}}, 400, "options.top_p: Expected `float` <= 1.0"),
        ({"options": {"num_predict": "many"}}, 400, "num_predict"),
        ({"messages": [{"role": "god", "content": ""}]}, 400, "role is 'god'"),
    ],
)
def test_a_refusal_is_one_sentence(
    client: ollama.Client, http: httpx.Client, body: dict[str, Any], status: int, said: str
) -> None:
    answer = http.post("/api/chat", json={"messages": HELLO, **body})
    assert answer.status_code == status and set(answer.json()) == {"error"}
    assert said in answer.json()["error"]


@pytest.mark.parametrize("field", ["suffix", "template"])
def test_fields_of_other_engines_are_refused(client: ollama.Client, field: str) -> None:
    with pytest.raises(ollama.ResponseError, match=f"{field} is not supported"):
        client.generate("demo", "hello", **{field: "x"})
    with pytest.raises(ollama.ResponseError, match="context is not supported"):
        client.generate("demo", "hello", context=[1, 2])
    with pytest.raises(ollama.ResponseError, match="embedding"):
        client.embed("demo", "hello")


def test_lm_studio_lists_the_model(http: httpx.Client) -> None:
    listed = http.get("/api/v0/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["type"], model["state"]) == ("demo", "llm", "loaded")
    assert (model["compatibility_type"], model["loaded_context_length"]) == ("mlx", 1024)
    assert model["quantization"] and model["capabilities"] == ["tool_use"]
    assert http.get("/api/v0/models/demo").json() == model
    assert http.get("/api/v0/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the script needs curl")
def test_the_commands_of_the_page_work(demo: Running) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    script = (
        page.partition("```bash\n")[2]
        .partition("```")[0]
        .replace("localhost:7109", demo.url.removeprefix("http://"))
    )
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    chat = done.stdout.splitlines()[:-1]
    listed = done.stdout.splitlines()[-1]
    assert all(json.loads(line)["message"]["role"] == "assistant" for line in chat)
    assert json.loads(chat[-1])["done_reason"] == "stop"
    assert json.loads(listed)["models"][0]["name"] == "demo"


def test_chat_tokens_are_counted_as_they_are_computed(http: httpx.Client) -> None:
    body = {"messages": HELLO, "tools": WEATHER, "max_tokens": 1}
    counted = http.post("/v1/chat/completions/input_tokens", json=body).json()
    spent = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": spent}


def test_open_webui_is_served_as_its_source_sends(http: httpx.Client) -> None:
    """Requests of backend/open_webui/routers/ollama.py of open-webui/open-webui, in its order."""
    sent = {"content-type": "application/json", "authorization": "Bearer any"}
    version = http.get("/api/version", headers=sent).json()["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split("."))) > (0,)
    (model,) = http.get("/api/tags", headers=sent).json()["models"]
    assert model["model"] and model["name"] == model["model"]
    (loaded,) = http.get("/api/ps", headers=sent).json()["models"]
    assert loaded["model"] == model["model"]
    assert datetime.fromisoformat(loaded["expires_at"]).timestamp() > 0
    shown = http.post("/api/show", content=json.dumps({"model": "demo"}), headers=sent)
    assert "completion" in shown.raise_for_status().json()["capabilities"]
    chat = {"model": "demo:latest", "messages": HELLO, "options": {"temperature": 0}}
    body = json.dumps({**chat, "stream": True})
    with http.stream("POST", "/api/chat", content=body, headers=sent) as answer:
        assert answer.status_code == 200
        found = [json.loads(line) for line in answer.iter_lines() if line.strip()]
    said = "".join(one["message"]["content"] for one in found)
    assert said and found[-1]["done"] and found[-1]["eval_count"] > 0
    talk = [{"role": "assistant", "content": said}, {"role": "user", "content": "a title?"}]
    title = {**chat, "stream": False, "messages": [*HELLO, *talk]}
    whole = http.post("/api/chat", content=json.dumps(title), headers=sent).json()
    assert whole["message"]["content"] and whole["done"]
    unload = {"model": "demo:latest", "keep_alive": 0, "prompt": ""}
    answer = http.post("/api/generate", content=json.dumps(unload), headers=sent)
    assert answer.raise_for_status().json()["done"]


def test_continue_is_served_as_its_source_sends(http: httpx.Client) -> None:
    """Requests of core/llm/llms/Ollama.ts of continuedev/continue at 0108be5, in its order."""
    shown = http.post("/api/show", json={"name": "demo"}).raise_for_status().json()
    for line in filter(None, shown["parameters"].split("\n")):
        assert re.match(r'^(\S+)\s+((?:".*")|\S+)$', line), "it reads no other parameters"
    params = {"num_predict": 8, "temperature": 0, "num_ctx": 1024, "stop": ["STOP"]}
    base = {"model": "demo", "options": params, "keep_alive": 1800}
    chat = {**base, "messages": HELLO, "stream": True}
    found = lines(http, "/api/chat", chat)
    assert all(one["message"]["role"] == "assistant" for one in found) and found[-1]["done"]
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    tool = {**chat, "messages": asked, "tools": WEATHER, "options": {"num_ctx": 1024}}
    (call,) = post(http, "/api/chat", tool)["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert call["function"]["arguments"] == {"city": "Paris"}
    complete = {**base, "prompt": "hello", "raw": True, "stream": True}
    assert all(isinstance(one["response"], str) for one in lines(http, "/api/generate", complete))


def test_the_last_message_of_the_assistant_is_continued(client: ollama.Client) -> None:
    asked: list[Any] = [{"role": "user", "content": "Hello!"}]
    greedy: Any = {"think": False, "options": {"temperature": 0, "num_predict": 20}}
    whole = client.chat("demo", asked, **greedy).message.content or ""
    begun = [*asked, {"role": "assistant", "content": whole[: whole.rindex(" ")]}]
    rest = client.chat("demo", begun, **greedy).message.content or ""
    assert rest and begun[-1]["content"] + rest == whole
    parts = client.chat("demo", begun, stream=True, **greedy)
    assert "".join(part.message.content or "" for part in parts) == rest


def test_an_open_answer_follows_the_instruction_of_its_format_and_an_empty_one_is_none() -> None:
    begun = [OllamaMessage("user", "x"), OllamaMessage("assistant", "{")]
    conversation = chat_conversation(OllamaChatBody(messages=begun, format="json"))
    assert conversation.continue_final
    assert [m.role for m in conversation.messages] == ["user", "system", "assistant"]
    empty = [OllamaMessage("user", "x"), OllamaMessage("assistant", "")]
    conversation = chat_conversation(OllamaChatBody(messages=empty))
    assert not conversation.continue_final
    assert [m.role for m in conversation.messages] == ["user"]
