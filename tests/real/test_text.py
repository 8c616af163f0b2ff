"""Real vocabularies, templates and texts over HTTP: what a demo of 1,024 tokens cannot show."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from mlxstack.core.preset import Speculation
from tests.real.asking import SCRIPTS, Asker, Comparison, asking, texts
from tests.real.folders import SMOLLM2, folder

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow, pytest.mark.real]

TURNS = "gemma3-270m-turns-bf16"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
N_AGENTS = 4
N_TURNS = 50
BLOCK = 128
"""Tokens of a block of the prefix index."""


@pytest.fixture(scope="module", params=[SMOLLM2, TURNS])
def speaking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with asking(folder(request.param), tmp_path_factory.mktemp("home")) as asker:
        yield asker


def chat(asker: Asker, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, **more}
    reply = asker.client.post("/v1/chat/completions", json=body).raise_for_status()
    return dict(reply.json())


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def constant(text: str) -> dict[str, Any]:
    """Response format whose only answer is this text as JSON."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}


def test_a_special_token_in_the_text_of_a_user_stays_text(speaking: Asker) -> None:
    plain = chat(speaking, user("a"), max_tokens=1)["usage"]["prompt_tokens"]
    for mark in ("<|im_end|>", "<end_of_turn>"):
        written = chat(speaking, user(mark), max_tokens=1)["usage"]["prompt_tokens"]
        assert written - plain >= 3


def test_characters_of_several_tokens_are_streamed_whole(speaking: Asker) -> None:
    body = {"messages": user("Repeat."), "response_format": constant(SCRIPTS), "temperature": 0}
    body |= {"stream": True, "max_tokens": 400}
    pieces = []
    with speaking.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert json.loads("".join(pieces)) == SCRIPTS
    assert len(pieces) > 20 and not any("\ufffd" in piece for piece in pieces)


def test_log_probabilities_of_a_large_vocabulary_are_sorted_and_sum_to_less_than_one(
    speaking: Asker,
) -> None:
    more = {"logprobs": True, "top_logprobs": 5, "max_tokens": 6, "temperature": 1, "seed": 1}
    reply = chat(speaking, user("What is the capital of France?"), **more, top_p=0.9)
    for token in reply["choices"][0]["logprobs"]["content"]:
        top = [entry["logprob"] for entry in token["top_logprobs"]]
        assert len(top) == 5 and top == sorted(top, reverse=True) and max(top) <= 0


def test_the_answer_is_what_everybody_knows(tmp_path: Path) -> None:
    with asking(folder(SMOLLM2), tmp_path) as asker:
        reply = chat(asker, user("What is the capital of France?"), max_tokens=24)
        assert "Paris" in reply["choices"][0]["message"]["content"]


def test_a_loop_of_forced_calls_keeps_its_prompt(speaking: Asker) -> None:
    messages = user("What is the weather in Paris, Rome and Oslo?")
    n_before = 0
    for city in ("Paris", "Rome", "Oslo"):
        reply = chat(speaking, messages, tools=[TOOL], tool_choice="required", max_tokens=60,
                     parallel_tool_calls=False)  # fmt: skip
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"city"}
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_before
        n_before = reply["usage"]["prompt_tokens"] - 8
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"{city}: sunny"}
        messages = [*messages, message, result]


@pytest.mark.parametrize("name", [SMOLLM2])
def test_four_agents_for_fifty_turns(name: str, tmp_path: Path) -> None:
    compared = Comparison(name)
    n_answer = 6
    n_more = 24
    with asking(folder(name), tmp_path) as asker:
        ids = {text: asker.ids(text, 200 + N_TURNS * n_more) for text in texts().values()}

        def talk(text: str) -> tuple[int, ...]:
            prompt = ids[text][:200]
            remaining = ids[text][200:]
            for turn in range(N_TURNS):
                answer = asker.answer(prompt, n_answer)
                assert turn == 0 or answer.n_cached >= len(prompt) - n_more - n_answer
                prompt += answer.tokens + remaining[turn * n_more : (turn + 1) * n_more]
            return prompt

        with ThreadPoolExecutor(N_AGENTS) as pool:
            last = list(pool.map(talk, ids))
        hits = [asker.answer(prompt, n_answer).tokens for prompt in last]
        colds = [asker.cold(prompt, n_answer) for prompt in last]
    assert all(compared.check("fifty turns", hits, colds))


def test_a_swap_to_another_model_and_back_keeps_conversations(tmp_path: Path) -> None:
    compared = Comparison("smollm2 <-> gemma3")
    with asking(folder(SMOLLM2), tmp_path) as asker:
        presets = tmp_path / "presets"
        presets.mkdir(exist_ok=True)
        for name in (SMOLLM2, TURNS):
            model = replace(asker.live.service.preset.model, id=str(folder(name)), alias=name)
            preset = replace(asker.live.service.preset, name=name, model=model)
            (presets / f"{name}.yaml").write_bytes(msgspec.yaml.encode(preset))
        prompt = asker.ids(texts()["prose"], 300)
        expected = asker.cold(prompt, 8)
        asker.answer(prompt, 8)
        for name in (TURNS, SMOLLM2):
            load(asker.client, name)
            served = asker.client.get("/v1/models").json()["data"][0]["id"]
            assert served == name
        answer = asker.answer(prompt, 8)
        assert answer.n_cached >= len(prompt) // BLOCK * BLOCK
    assert all(compared.check("swap and back", [answer.tokens], [expected]))


def test_drafts_on_real_text_change_no_token(tmp_path: Path) -> None:
    compared = Comparison(SMOLLM2)
    answers = {}
    copy = "Repeat this text word by word:\n" + texts()["prose"][:600]
    code = "Print this function again:\n```python\n" + texts()["code"][2000:2900] + "\n```"
    asked = (copy, code, "Write a long story about a dragon who counts stones.")
    for mode in Speculation:
        with asking(folder(SMOLLM2), tmp_path / mode, speculation=mode) as asker:
            answers[mode] = [
                chat(asker, user(text), max_tokens=64)["choices"][0]["message"]["content"]
                for text in asked
            ]
    assert all(compared.check("drafts", *answers.values()))


def load(client: httpx.Client, preset: str) -> None:
    client.post("/v1/models/load", json={"preset": preset}).raise_for_status()
