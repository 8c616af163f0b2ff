"""A sampled call returns to its own conversation as it was sampled, and to no other one."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import Struct

from mlxstack.core.preset import ApiKey, ServerSpec
from tests.api.running import serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

CALL = '<tool_call>{"arguments":{"city":"Ulm"},"name":"weather"}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
KEYS = ("plain", ApiKey("team", salt="team's"))


class Stage(Struct):
    """A service with two tenants, whose model makes one call."""

    engine: StandIn
    http: httpx.Client

    headers: list[httpx.Headers] = []

    def replayed(self) -> str | None:
        """Number of replayed answers and calls of the latest prompt, as the header tells it."""
        return self.headers[-1].get("x-mlx-stack-replayed")

    def ask(self, *turns: Any, key: str = "plain", **more: Any) -> Any:
        """The answer's message, and the tokens that the engine was given."""
        user = {"role": "user", "content": "How is it in Ulm?"}
        body = {
            "messages": [user, *turns],
            "tools": TOOLS,
            "chat_template_kwargs": {"enable_thinking": False},
            **more,
        }
        made = self.http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
        self.headers.append(made.raise_for_status().headers)
        return made.json()["choices"][0]["message"], self.engine.asked[-1].tokens


@pytest.fixture
def stage() -> Iterator[Stage]:
    service, engine = standing(ServerSpec(port=0, api_keys=KEYS))
    engine.loading.set_result(FACTS)
    engine.script = engine.tokenizer.encode(CALL, add_special_tokens=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        yield Stage(engine, http)


def test_c4_the_next_prompt_holds_the_sampled_tokens(stage: Stage) -> None:
    answer, tokens = stage.ask()
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sunny"}
    sampled = tokens + tuple(stage.engine.script or ())
    _, following = stage.ask(answer, result)
    assert following[: len(sampled)] == sampled
    _, later = stage.ask(answer, result, {"role": "assistant", "content": "Fine."})
    assert later[: len(sampled)] == sampled


def test_the_header_tells_what_was_replayed(stage: Stage) -> None:
    answer, _ = stage.ask()
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sunny"}
    assert stage.replayed() is None
    stage.ask(answer, result)
    assert stage.replayed() == "1"
    stage.ask(answer, result, agent="other")
    assert stage.replayed() is None


def test_a_thought_comes_back_with_its_sampled_answer_or_not_at_all(stage: Stage) -> None:
    """Other tools change the prompt before the answer, which is then the template's."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    tokenizer = stage.engine.tokenizer
    stage.engine.script = tokenizer.encode(f"Hm.</think>{CALL}", add_special_tokens=False)
    answer, _ = stage.ask(**thinking)
    assert answer.pop("reasoning_content") == "Hm."
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sunny"}
    _, same = stage.ask(answer, result, **thinking)
    others = [TOOLS[0], {"type": "function", "function": {"name": "lookup"}}]
    _, other = stage.ask(answer, result, tools=others, **thinking)
    assert ["Hm." in tokenizer.decode(list(tokens)) for tokens in (same, other)] == [True, False]


def test_redteam_8_no_call_of_one_tenant_or_agent_reaches_another(stage: Stage) -> None:
    answer, tokens = stage.ask()
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sunny"}
    sampled = tokens + tuple(stage.engine.script or ())
    _, own = stage.ask(answer, result)
    unknown = [answer | {"tool_calls": [answer["tool_calls"][0] | {"id": "call_x"}]}]
    _, cold = stage.ask(*unknown, result | {"tool_call_id": "call_x"})
    _, other = stage.ask(answer, result, key="team")
    _, agent = stage.ask(answer, result, agent="other")
    assert other == agent == cold
    assert own[: len(sampled)] == sampled != other[: len(sampled)]
