"""Fuzzes every body of every dialect against the real app: whatever comes, never a 5xx."""

import asyncio
from concurrent.futures import Future
from functools import cache
from typing import Any

import httpx
import msgspec
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec import Struct

from mlxstack.api.app import create_app
from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.llama_server.request_schema import LlamaCompletionBody
from mlxstack.api.dialects.llama_server.slots import FileBody
from mlxstack.api.dialects.llama_server.tokenize import DetokenizeBody, TokenizeBody
from mlxstack.api.dialects.native.agents import (
    ChangeBody,
    CreateBody,
    ForkBody,
    GenerateBody,
    RewindBody,
)
from mlxstack.api.dialects.native.prefix_cache import PrefixBody
from mlxstack.api.dialects.ollama.request_schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaModelBody,
)
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_completions.schema import CompletionBody
from mlxstack.api.dialects.openai_embeddings.routes import EmbeddingsBody
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.streaming import EVENT_STREAM, JSON_LINES
from mlxstack.core.commands import AgentKVLocation, CollectGarbage
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from mlxstack.demo import MODEL_DIR
from tests.fuzz.dice import Dice
from tests.fuzz.spelling import body
from tests.service.standin import FACTS, NoCache, StandIn, over

DOORS: tuple[tuple[str, type[Struct]], ...] = (
    ("/v1/chat/completions", ChatBody),
    ("/v1/messages", MessagesBody),
    ("/v1/responses", ResponsesBody),
    ("/v1/agents/bob/generate", GenerateBody),
    ("/v1/completions", CompletionBody),
    ("/completion", LlamaCompletionBody),
    ("/apply-template", ChatBody),
    ("/v1/messages/count_tokens", MessagesBody),
    ("/v1/responses/input_tokens", ResponsesBody),
    ("/tokenize", TokenizeBody),
    ("/detokenize", DetokenizeBody),
    ("/v1/embeddings", EmbeddingsBody),
    ("/v1/agents", CreateBody),
    ("/v1/agents/bob", ChangeBody),
    ("/v1/agents/bob/fork", ForkBody),
    ("/v1/agents/bob/rewind", RewindBody),
    ("/cache/prefixes", PrefixBody),
    ("/cache/warm", PrefixBody),
    ("/cache/gc", CollectGarbage),
    ("/slots/0?action=save", FileBody),
    ("/api/chat", OllamaChatBody),
    ("/api/generate", OllamaGenerateBody),
    ("/api/embed", OllamaEmbedBody),
    ("/api/show", OllamaModelBody),
)
SPOKEN = (
    "Hello there.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "<think>\nhm\n</think>\n\nYes \U0001f9e0.",
    '{"a": 1}',
)
# Not served here, or not now: words for people, and no fault.
FINE = frozenset({501, 503, 529})


class EmptyCache(NoCache):
    """Locates every agent nowhere, and refuses all other calls."""

    def locate_agents(self, agents: tuple[str, ...]) -> Future[tuple[AgentKVLocation, ...]]:
        future: Future[tuple[AgentKVLocation, ...]] = Future()
        future.set_result(tuple(AgentKVLocation(agent) for agent in agents))
        return future


class House:
    """The app over a stand-in that says something of `SPOKEN`; no socket is in between."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.engine = StandIn(load_tokenizer(MODEL_DIR))
        self.engine.cache = EmptyCache()
        self.engine.loading.set_result(FACTS)
        preset = Preset(
            model=ModelSpec(id="standin"), slots=SlotSpec(n_ctx=1024), server=ServerSpec()
        )
        service = over(self.engine, preset)
        self._loop.run_until_complete(service.start())
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=True)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def post(self, path: str, data: bytes, answer_text: str) -> httpx.Response:
        """One request, and what the model says to it."""
        self.engine.script = self.engine.tokenizer.encode(answer_text, add_special_tokens=False)
        self.engine.asked.clear()
        headers = {"content-type": "application/json"}
        asking = self._client.post(path, content=data, headers=headers)
        return self._loop.run_until_complete(asyncio.wait_for(asking, 120))


@cache
def house() -> House:
    """One for all."""
    return House()


def doors(data: bytes) -> None:
    """Raises AssertionError when a body is answered with a 5xx, or with what nobody can read."""
    dice = Dice(data)
    path, kind = dice.pick(DOORS)
    answer_text = dice.pick(SPOKEN)
    content = body(kind, dice)
    answer = house().post(path, content, answer_text)
    code = answer.status_code
    assert code < 500 or code in FINE, f"{path} {content!r}: {code} {answer.text}"
    kind_of_answer = answer.headers["content-type"].partition(";")[0]
    if kind_of_answer == EVENT_STREAM:
        _check_stream(answer.text, content)
    elif kind_of_answer == JSON_LINES:
        lines = [msgspec.json.decode(line) for line in answer.content.splitlines()]
        assert lines[-1].get("done") is True, f"{content!r}: {answer.text}"
    else:
        msgspec.json.decode(answer.content)


def _check_stream(text: str, data: bytes) -> None:
    assert text.endswith("\n\n"), f"{data!r}: a stream was cut: {text!r}"
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event: Any = msgspec.json.decode(line[6:])
            error = event.get("error") or {}
            assert error.get("type") not in {"server_error", "api_error"}, f"{data!r}: {line}"
