"""Legacy completions over HTTP, on a real engine, read by OpenAI's own types."""

import httpx
import pytest
from openai.types import Completion

from tests.api.requests import chunks

pytestmark = [pytest.mark.mlx, pytest.mark.net]

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 9, "temperature": 0, "ignore_eos": True}


def test_whole_answer_is_of_the_sdk_type(http: httpx.Client) -> None:
    body = http.post(PATH, json={**BODY, "logprobs": 2}).json()
    parsed = Completion.model_validate(body, strict=True)
    assert parsed.usage is not None
    assert parsed.usage.completion_tokens == 9
    found = parsed.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens).encode("utf-8", "replace")
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(9)]


def test_every_prompt_has_its_choice(http: httpx.Client) -> None:
    prompts = ["once upon a time", "the end of it"]
    alone = [http.post(PATH, json={**BODY, "prompt": one}).json() for one in prompts]
    both = http.post(PATH, json={**BODY, "prompt": prompts}).json()
    assert [one["text"] for one in both["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert [one["index"] for one in both["choices"]] == [0, 1]
    assert both["usage"]["completion_tokens"] == 18


def test_stream_of_several_prompts_adds_up(http: httpx.Client) -> None:
    body = {**BODY, "prompt": ["once upon a time", "the end of it"]}
    whole = http.post(PATH, json=body).json()
    found = chunks(http, PATH, {**body, "stream_options": {"include_usage": True}})
    for chunk in found:
        Completion.model_validate({**chunk, "choices": []}, strict=True)
    for choice in whole["choices"]:
        own = [c for chunk in found for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[-1]["finish_reason"] == "length"
    assert found[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_usage_so_far_of_each_prompt_is_in_every_chunk(http: httpx.Client) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BODY, "prompt": ["once upon a time", "the end of it"], "stream_options": asked}
    found = chunks(http, PATH, body)
    for index in (0, 1):
        own = [one["usage"] for one in found if [c["index"] for c in one["choices"]] == [index]]
        n_tokens = [one["completion_tokens"] for one in own]
        assert n_tokens == sorted(n_tokens) and (n_tokens[0], n_tokens[-1]) == (1, 9)
    assert found[-1]["usage"]["completion_tokens"] == 18


def test_streamed_logprobs_are_those_of_the_whole_answer(http: httpx.Client) -> None:
    body = {**BODY, "max_tokens": 40, "logprobs": 2}
    text = http.post(PATH, json=body).json()["choices"][0]["text"]
    # The tokens of a stop word are noted, though their text is not said.
    body["stop"] = [text[30:36]]
    whole = http.post(PATH, json=body).json()["choices"][0]["logprobs"]
    pieces = [c["logprobs"] for chunk in chunks(http, PATH, body) for c in chunk["choices"]]
    noted = [piece for piece in pieces if piece is not None]
    assert len(noted) > 3
    assert whole == {name: [x for piece in noted for x in piece[name]] for name in whole}


@pytest.mark.parametrize("field", ["echo", "suffix", "best_of", "n"])
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, field: str) -> None:
    value = {"echo": True, "suffix": "x", "best_of": 2, "n": 99}[field]
    answer = http.post(PATH, json={**BODY, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_prompt_that_is_too_long_is_blamed_on_its_field(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5] * 100_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
