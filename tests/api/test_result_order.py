"""Parallel tool results are paired with their calls on every endpoint, in any order."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec import Struct

from tests.api.running import answering
from tests.service.standin import StandIn

pytestmark = pytest.mark.net

ASKED = "Weather in Rome and Oslo?"
CITIES = {"c1": "Rome", "c2": "Oslo"}
Bodies = Callable[[list[str]], dict[str, Any]]


class Stage(Struct):
    engine: StandIn
    http: httpx.Client

    def prompt(self, path: str, body: dict[str, Any]) -> str:
        """The prompt that the engine is given."""
        self.http.post(path, json=body).raise_for_status()
        return str(self.engine.tokenizer.decode(list(self.engine.asked[-1].tokens)))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with answering() as (engine, http):
        yield Stage(engine, http)


def chat(order: list[str]) -> dict[str, Any]:
    calls = [
        {"id": key, "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for key, city in CITIES.items()
    ]
    results = [{"role": "tool", "tool_call_id": key, "content": f"in {key}"} for key in order]
    asked = {"role": "user", "content": ASKED}
    return {"messages": [asked, {"role": "assistant", "tool_calls": calls}, *results]}


def responses(order: list[str]) -> dict[str, Any]:
    calls = [
        {"type": "function_call", "call_id": key, "name": "weather", "arguments": "{}"}
        for key in CITIES
    ]
    results = [
        {"type": "function_call_output", "call_id": key, "output": f"in {key}"} for key in order
    ]
    return {"input": [{"role": "user", "content": ASKED}, *calls, *results]}


def anthropic(order: list[str]) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": key, "name": "weather", "input": {}} for key in CITIES]
    results = [{"type": "tool_result", "tool_use_id": key, "content": f"in {key}"} for key in order]
    turns = [("user", ASKED), ("assistant", calls), ("user", results)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def ollama(order: list[str]) -> dict[str, Any]:
    """Without ids: a result has the name of its call."""
    calls = [{"function": {"name": f"weather_{key}", "arguments": {}}} for key in CITIES]
    results = [
        {"role": "tool", "tool_name": f"weather_{key}", "content": f"in {key}"} for key in order
    ]
    asked = {"role": "user", "content": ASKED}
    return {"messages": [asked, {"role": "assistant", "tool_calls": calls}, *results]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/responses", responses),
        ("/v1/messages", lambda order: {**anthropic(order), "max_tokens": 9}),
        ("/api/chat", ollama),
    ],
)
def test_results_in_any_order_are_one_prompt_of_one_conversation(
    stage: Stage, path: str, body: Bodies
) -> None:
    prompt = stage.prompt(path, body(["c2", "c1"]))
    name = stage.engine.asked[-1].display_name
    assert prompt.index("in c1") < prompt.index("in c2")
    assert stage.prompt(path, body(["c1", "c2"])) == prompt
    assert stage.engine.asked[-1].display_name == name


def test_results_of_an_agent_are_paired_with_the_calls_of_its_history(stage: Stage) -> None:
    prompts = []
    for order in (["c1", "c2"], ["c2", "c1"]):
        agent = f"agent-{order[0]}"
        asked, calling, *results = chat(order)["messages"]
        body = {"append": [asked, calling, *results]}
        stage.prompt(f"/v1/agents/{agent}/generate", body)
        body = {"append": [{"role": "user", "content": "And now?"}]}
        prompts.append(stage.prompt(f"/v1/agents/{agent}/generate", body))
    assert prompts[0] == prompts[1]
    assert prompts[0].index("in c1") < prompts[0].index("in c2")


def test_apply_template_pairs_results_too(stage: Stage) -> None:
    prompts = [
        stage.http.post("/apply-template", json=chat(order)).json()["prompt"]
        for order in (["c1", "c2"], ["c2", "c1"])
    ]
    assert prompts[0] == prompts[1]


def test_results_without_ids_go_to_their_calls_in_order(stage: Stage) -> None:
    body = chat([])
    for call in body["messages"][1]["tool_calls"]:
        del call["id"]
    body["messages"] += [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": "wet"}]
    first = stage.http.post("/apply-template", json=body).json()["prompt"]
    assert stage.http.post("/apply-template", json=body).json()["prompt"] == first
    assert first.index("sunny") < first.index("wet")
