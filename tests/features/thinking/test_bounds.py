"""Thoughts of clients that send no bound end with that of the preset, in every dialect."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct, structs

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec, Speculation
from mlxstack.core.thinking import ClientSpec, Effort, ThinkingSpec
from tests import models
from tests.api.running import Running, running
from tests.patience import PATIENCE_S
from tests.repetition import all_in_soak
from tests.text.conftest import (
    CHATML,
    CHATML_ADDED,
    CHATML_SPECIAL,
    HARMONY,
    HARMONY_SPECIAL,
    byte_level,
    loaded,
)
from tests.text.test_published_templates import FOLDER, tokenizer_of

pytestmark = [pytest.mark.mlx, pytest.mark.net]

BUDGET = 12
N_MARKS = 8
"""Most tokens of the marks that close a thought."""
ASKED = [{"role": "user", "content": "which city is the capital of France? think"}]
BODY: dict[str, Any] = {"max_tokens": BUDGET + N_MARKS + 8, "messages": ASKED}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "visit", "description": "Visit a city", "parameters": SCHEMA}
SUBAGENT = {"user-agent": "claude-cli/2.1 (external, cli)", "x-claude-code-agent-id": "a1"}


class Reply(Struct, frozen=True):
    """Answer of one dialect."""

    content: str
    thought: str
    n_reasoning: int | None = None


def chat(http: httpx.Client, **more: Any) -> Reply:
    made = http.post("/v1/chat/completions", json={**BODY, **more}).raise_for_status().json()
    return of_completion(made)


def of_completion(made: Any) -> Reply:
    message = made["choices"][0]["message"]
    n_reasoning = made["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return Reply(message["content"] or "", message.get("reasoning_content") or "", n_reasoning)


def agent(http: httpx.Client) -> Reply:
    made = http.post("/v1/agents/silent/generate", json=BODY).raise_for_status().json()
    http.delete("/v1/agents/silent").raise_for_status()
    return of_completion(made)


def messages(http: httpx.Client) -> Reply:
    blocks = http.post("/v1/messages", json=BODY).raise_for_status().json()["content"]
    texts = [block.get("text", "") for block in blocks]
    return Reply("".join(texts), "".join(block.get("thinking", "") for block in blocks))


def responses(http: httpx.Client) -> Reply:
    body = {"input": ASKED[0]["content"], "max_output_tokens": BODY["max_tokens"]}
    made = http.post("/v1/responses", json=body).raise_for_status().json()
    parts = [part for item in made["output"] for part in item.get("content") or ()]
    kinds = ("output_text", "reasoning_text")
    texts = ["".join(p["text"] for p in parts if p["type"] == kind) for kind in kinds]
    details = made["usage"]["output_tokens_details"]
    return Reply(texts[0], texts[1], details["reasoning_tokens"])


def ollama(http: httpx.Client) -> Reply:
    body = {"messages": ASKED, "stream": False, "options": {"num_predict": BODY["max_tokens"]}}
    message = http.post("/api/chat", json=body).raise_for_status().json()["message"]
    return Reply(message["content"], message.get("thinking") or "")


DIALECTS = (chat, agent, messages, responses, ollama)


def preset_of(model: str, **sampling: Any) -> Preset:
    return Preset(
        model=ModelSpec(id=model, alias="thinker"),
        slots=SlotSpec(count=2, n_ctx=1024),
        server=ServerSpec(port=0),
        sampling=SamplingSpec(temperature=0, thinking_budget=BUDGET, **sampling),
        clients={"claude-code": ClientSpec(subagents=ThinkingSpec(effort=Effort.NONE))},
        subagents=ThinkingSpec(thinking_budget=5),
    )


def random_thinker(folder: Path, special: list[str], added: list[str], template: str) -> str:
    """A random model with a tokenizer and a chat template of a thinking family."""
    tokenizer = byte_level(special, added)
    models.write(folder, {**models.LLAMA, "vocab_size": tokenizer.get_vocab_size()}, seed=3)
    end = "<|im_end|>" if "<|im_end|>" in special else "<|return|>"
    loaded(folder, tokenizer, template, {"eos_token": end})
    return str(folder)


def published_thinker(folder: Path, name: str) -> str:
    """A random model with a tokenizer of the marks of a published template."""
    folder.mkdir()
    tokenizer = tokenizer_of(Path(FOLDER, "models", "templates", f"{name}.jinja"), folder)
    models.write(folder / "weights", {**models.LLAMA, "vocab_size": len(tokenizer)}, seed=3)
    for file in ("config.json", "model.safetensors"):
        (folder / "weights" / file).rename(folder / file)
    return str(folder)


PUBLISHED = ("Qwen3.5-4B", "GLM-4.7-Flash", "openai-gpt-oss-120b")
"""Templates of the folder MLX_STACK_FORMATS, tried where there is one."""
MODELS = ["demo", "chatml", "harmony"]
if FOLDER:
    MODELS += all_in_soak(PUBLISHED, "GLM-4.7-Flash")


@pytest.fixture(scope="module", params=MODELS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The demo, and random models that think as Qwen's and as gpt-oss do."""
    folder = tmp_path_factory.mktemp("model") / request.param
    model = "demo"
    if request.param == "chatml":
        model = random_thinker(folder, CHATML_SPECIAL, CHATML_ADDED, CHATML)
    elif request.param == "harmony":
        model = random_thinker(folder, HARMONY_SPECIAL, [], HARMONY)
    elif request.param in PUBLISHED:
        model = published_thinker(folder, request.param)
    with running(preset_of(model), tmp_path_factory.mktemp("home")) as service:
        yield service


@pytest.fixture
def http(live: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize("ask", DIALECTS, ids=lambda ask: ask.__name__)
def test_a_silent_clients_thought_ends_with_the_bound_of_the_preset(
    live: Running, http: httpx.Client, ask: Callable[[httpx.Client], Reply]
) -> None:
    reply = ask(http)
    assert reply.content, "the thought took the whole answer"
    # Channels of a random model are no thoughts until the mark of the answer comes.
    assert reply.thought or live.service.preset.model.id.endswith(("harmony", "120b"))
    if reply.n_reasoning is not None:
        assert reply.n_reasoning <= BUDGET + N_MARKS
    bound = http.get("/requests").json()[0]["thinking"]
    assert (bound["budget"], bound["budget_by"]) == (BUDGET, "preset")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": TOOL}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"temperature": 1.0, "seed": 4},
    ],
    ids=["tools", "grammar", "sampled"],
)
def test_the_bound_holds_beside_grammars(http: httpx.Client, more: dict[str, Any]) -> None:
    reply = chat(http, **more)
    assert reply.n_reasoning is not None and reply.n_reasoning <= BUDGET + N_MARKS
    if "response_format" in more:
        assert reply.content.startswith("{")


def test_drafts_do_not_change_a_bounded_answer(live: Running, tmp_path: Path) -> None:
    preset = structs.replace(live.service.preset, speculation=Speculation.OFF)
    with (
        running(preset, tmp_path) as plain,
        httpx.Client(base_url=plain.url, timeout=PATIENCE_S) as without,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as drafting,
    ):
        assert chat(without) == chat(drafting)


def test_a_sub_agent_has_the_bound_of_its_client(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=BODY, headers=SUBAGENT).raise_for_status()
    bound = http.get("/requests").json()[0]["thinking"]
    assert (bound["effort"], bound["effort_by"]) == ("none", "sub-agents of claude-code")
    unknown = {**SUBAGENT, "user-agent": "aider/1.0"}
    http.post("/v1/chat/completions", json=BODY, headers=unknown).raise_for_status()
    bound = http.get("/requests").json()[0]["thinking"]
    assert (bound["budget"], bound["budget_by"]) == (5, "sub-agents")


def test_a_request_outranks_its_agent_and_the_agent_its_preset(http: httpx.Client) -> None:
    body = {**BODY, "agent": "bob"}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    http.post("/v1/agents/bob", json={"thinking_budget": 3}).raise_for_status()
    bounds = []
    for more in ({}, {"thinking_budget": 7}, {"thinking_budget": -1}):
        http.post("/v1/chat/completions", json={**body, **more}).raise_for_status()
        bound = http.get("/requests").json()[0]["thinking"]
        bounds.append((bound["budget"], bound["budget_by"]))
    assert bounds == [(3, "agent"), (7, "request"), (None, "request")]
