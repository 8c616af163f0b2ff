"""A prompt that is too long is refused in the words by which the clients of each API compact."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxstack.api.error_bodies import ollama_error
from mlxstack.core.errors import TooLong
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, ServiceKind, SlotSpec
from tests.api.running import Running
from tests.gateway.gateway_thread import WAYS, running_behind, standing_behind
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LONG = {"a long prompt": "word " * 20_000, "one refused uncounted": "word " * 200_000}
OPENAI = r"This model's maximum context length is \d+ tokens\. However, your {} resulted in \d+"
ANTHROPIC = r"^prompt is too long: \d+ tokens > \d+ maximum$"
LLAMA = r"^request \(\d+ tokens\) exceeds the available context size \(\d+ tokens\)"
OLLAMA = r"^prompt too long; exceeded max context length by [1-9]\d* tokens: the prompt has \d+"

CHATS = {
    "/v1/chat/completions": OPENAI.format("messages"),
    "/v1/batch/chat/completions": OPENAI.format("messages"),
    "/api/v0/chat/completions": OPENAI.format("messages"),
    "/chat/completions": OPENAI.format("messages"),
    "/v1/messages": ANTHROPIC,
    "/api/chat": OLLAMA,
}
PROMPTS = {
    "/v1/completions": OPENAI.format("prompt"),
    "/api/v0/completions": OPENAI.format("prompt"),
    "/completion": LLAMA,
    "/completions": LLAMA,
    "/api/generate": OLLAMA,
}
INPUTS = {"/v1/responses": OPENAI.format("input"), "/responses": OPENAI.format("input")}
FIELDS = {**dict.fromkeys(CHATS, "messages"), **dict.fromkeys(PROMPTS, "prompt")}
WORDS = {**CHATS, **PROMPTS, **INPUTS}

CLIENTS = {
    "pi, opencode, openclaw": r"(?i)prompt is too long|maximum context length is \d+ tokens|"
    r"exceeds the available context size|prompt too long; exceeded (max )?context length",
    "openfox, reasonix": r"(?i)context_length_exceeded|maximum context length|prompt is too long|"
    r"exceed_context_size_error|exceeds the available context size|exceeded max context length",
}


@pytest.fixture(scope="module", params=WAYS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("standing")
    with standing_behind(request.param, ServerSpec(port=0), folder) as (found, _):
        yield found.url


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path in CHATS:
        return {"messages": [{"role": "user", "content": text}], **more}
    return {FIELDS.get(path, "input"): text, **more}


def message_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("path", WORDS)
def test_an_overflow_is_told_in_the_words_of_the_api(
    url: str, path: str, text: str, stream: bool
) -> None:
    sent = body(path, text, stream=stream)
    answer = httpx.post(url + path, json=sent, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert re.search(WORDS[path], message_of(answer)), answer.text
    for client, pattern in CLIENTS.items():
        assert re.search(pattern, answer.text), client
    error = answer.json()["error"]
    if WORDS[path].startswith("This"):
        place = FIELDS.get(path, "input")
        assert (error["code"], error["param"]) == ("context_length_exceeded", place)
    if "type" in error and WORDS[path] is LLAMA:
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] > error["n_ctx"]


def test_a_raw_prompt_of_ollama_has_the_same_words(url: str) -> None:
    for text in LONG.values():
        sent = {"prompt": text, "raw": True}
        answer = httpx.post(f"{url}/api/generate", json=sent, timeout=PATIENCE_S)
        assert re.search(OLLAMA, message_of(answer))


def test_counting_names_the_field_that_was_sent(url: str) -> None:
    sent = {"input": LONG["one refused uncounted"]}
    answer = httpx.post(f"{url}/v1/responses/input_tokens", json=sent, timeout=PATIENCE_S)
    assert answer.json()["error"]["param"] == "input"


def test_a_prompt_without_room_for_an_answer_is_over_by_one_token() -> None:
    assert "length by 1 tokens" in ollama_error(TooLong(4096, 4096), "")["error"]
    assert "length by 7 tokens" in ollama_error(TooLong(4103, 4096), "")["error"]


@pytest.fixture(scope="module", params=WAYS)
def embedding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo", alias="vectors"),
        name="vectors",
        kind=ServiceKind.EMBEDDING,
        slots=SlotSpec(count=1, n_ctx=1024),
        server=ServerSpec(port=0),
    )
    with running_behind(request.param, preset, tmp_path_factory.mktemp("vectors")) as found:
        yield found


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_texts_to_embed_are_cut_or_refused(embedding: Running, text: str) -> None:
    def post(path: str, **sent: Any) -> httpx.Response:
        return httpx.post(embedding.url + path, json=sent, timeout=PATIENCE_S)

    assert post("/api/embed", input=text).json()["prompt_eval_count"] == 1024
    assert post("/api/embeddings", prompt=text).json()["embedding"]
    whole = post("/api/embed", input=text, truncate=False)
    assert whole.status_code == 400
    assert "the input length exceeds the context length" in whole.json()["error"]
    error = post("/v1/embeddings", input=["a", text]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert re.search(OPENAI.format("input"), error["message"])


def test_token_ids_that_are_too_many_name_their_field(embedding: Running) -> None:
    answer = httpx.post(f"{embedding.url}/v1/embeddings", json={"input": [5] * 2000})
    assert answer.json()["error"]["param"] == "input"
