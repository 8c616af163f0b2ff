"""Requests of llama-server's own test suite: lists of prompts, biases of texts, no limit."""

import socket
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from mlxstack.core.preset import SamplingSpec, ServerSpec
from tests.api.requests import chunks
from tests.api.running import serving, standing
from tests.service.standin import FACTS

pytestmark = [pytest.mark.mlx, pytest.mark.net]
PATH = "/completion"
BODY = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
TEXTS = ["once upon a time", "the end of it"]


def tokens_of(http: httpx.Client, text: str, **more: Any) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"content": text, **more}).json()["tokens"]
    return found


def complete(http: httpx.Client, prompt: Any, **more: Any) -> Any:
    return http.post(PATH, json={**BODY, "prompt": prompt, **more}).raise_for_status().json()


def test_a_list_of_prompts_gets_a_list_of_answers(http: httpx.Client) -> None:
    ids = tokens_of(http, TEXTS[1])
    prompts = [TEXTS[0], ids, [*ids[:2], "and then", ids[0]]]
    alone = [complete(http, prompt) for prompt in prompts]
    found = complete(http, prompts)
    assert [one["index"] for one in found] == [0, 1, 2]
    for one, other in zip(found, alone, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["content"] == other["content"]
        assert one["tokens_evaluated"] == other["tokens_evaluated"]
        assert one["prompt"] == other["prompt"]
        assert one["stop"] is True
    assert complete(http, [TEXTS[0]])["tokens"] == alone[0]["tokens"], "one prompt: one object"


def test_a_list_with_a_token_is_one_prompt(http: httpx.Client) -> None:
    ids = tokens_of(http, TEXTS[0])
    more = tokens_of(http, "and then")
    found = complete(http, [*ids, "and then"])
    assert found["tokens"] == complete(http, [*ids, *more])["tokens"]
    assert found["tokens_evaluated"] == len(ids) + len(more)
    assert complete(http, [TEXTS[0], *more])["tokens_evaluated"] == found["tokens_evaluated"]


def test_a_prompt_object_is_its_text(http: httpx.Client) -> None:
    alone = complete(http, TEXTS[0])
    found = complete(http, [tokens_of(http, TEXTS[1]), {"prompt_string": TEXTS[0]}])
    assert found[1]["tokens"] == alone["tokens"]
    assert found[1]["prompt"] == TEXTS[0]


NO_PROMPTS = [[], [1, [2]], [999_999_999, "a"], [[]], {}]
IMAGE = {"prompt_string": "a", "multimodal_data": ["AAAA"]}


@pytest.mark.parametrize("prompt", [*NO_PROMPTS, IMAGE])
def test_a_prompt_that_is_none_is_refused(http: httpx.Client, prompt: Any) -> None:
    answer = http.post(PATH, json={**BODY, "prompt": prompt})
    assert answer.status_code == 400


def test_the_stream_of_several_prompts_names_each(http: httpx.Client) -> None:
    whole = complete(http, TEXTS)
    found = chunks(http, PATH, {**BODY, "prompt": TEXTS})
    for one in whole:
        own = [chunk for chunk in found if chunk["index"] == one["index"]]
        assert "".join(chunk["content"] for chunk in own) == one["content"]
        assert [chunk["stop"] for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[-1]["tokens_predicted"] == 6


def test_a_bias_of_a_text_is_one_of_each_of_its_tokens(http: httpx.Client) -> None:
    text = "hello world"
    ids = tokens_of(http, text, add_special=False)
    assert len(ids) > 1
    for bias in ([[text, 50]], {text: 50}):
        found = complete(http, TEXTS[0], logit_bias=bias)
        assert (
            found["tokens"] == complete(http, TEXTS[0], logit_bias=[[i, 50] for i in ids])["tokens"]
        )
        assert set(found["tokens"]) <= set(ids)
        told = found["generation_settings"]["logit_bias"]
        assert told == [{"bias": 50, "token": i} for i in ids]
    by_id = complete(http, TEXTS[0], logit_bias={str(ids[0]): 90})
    assert set(by_id["tokens"]) == {ids[0]}
    forbidden = complete(http, TEXTS[0], logit_bias=[[i, 50] for i in ids] + [[text, False]])
    assert not set(forbidden["tokens"]) & set(ids)


def test_texts_of_biases_are_bounded(http: httpx.Client) -> None:
    for bias in ([["a", 1]] * 1001, {"a" * 1001: 1}):
        answer = http.post(PATH, json={**BODY, "prompt": "a", "logit_bias": bias})
        assert answer.status_code == 400
        assert "logit_bias may have 1000 texts of 1000 characters" in answer.text


@pytest.mark.parametrize("limit", [-1, 7])
def test_no_limit_of_a_preset_or_a_request_is_the_context(limit: int) -> None:
    service, engine = standing(ServerSpec(port=0))
    service.preset = replace(service.preset, sampling=SamplingSpec(max_tokens=limit))
    engine.loading.set_result(FACTS)
    bodies = (
        ("/completion", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        for path, body in bodies:
            httpx.post(found.url + path, json=body).raise_for_status()
            ask = engine.asked[-1]
            whole = service.n_ctx - len(ask.tokens)
            assert ask.max_tokens == (whole if limit == -1 else 7), path
            httpx.post(found.url + path, json={**body, "max_tokens": -1}).raise_for_status()
            assert engine.asked[-1].max_tokens == whole, path
        props = httpx.get(f"{found.url}/props").json()
    assert props["default_generation_settings"]["params"]["max_tokens"] == limit


CHAT = "/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_has_only_the_fields_asked_for(http: httpx.Client, is_stream: bool) -> None:
    paths = ["tokens_predicted", "generation_settings/n_predict", "timings/prompt_n", "no/such"]
    body = {**BODY, "prompt": TEXTS[0], "response_fields": paths}
    answer = chunks(http, PATH, body)[-1] if is_stream else complete(http, **body)
    assert set(answer) == set(paths[:3])
    assert answer["generation_settings/n_predict"] == answer["tokens_predicted"] == 6
    assert "timings" in complete(http, TEXTS[0], response_fields=[])


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "exceed_context_size_error"), ("/v1" + CHAT, "invalid_request_error")]
)
def test_a_long_prompt_has_the_type_of_its_path(http: httpx.Client, path: str, kind: str) -> None:
    answer = http.post(path, json={"messages": HELLO * 2000})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, kind)
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 1024


def test_verbose_shows_the_prompt(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 2}
    prompt = http.post("/apply-template", json=body).json()["prompt"]
    told = http.post(CHAT, json={**body, "verbose": True}).json()
    assert told["__verbose"]["prompt"] == prompt
    assert told["__verbose"]["tokens_evaluated"] == told["usage"]["prompt_tokens"]
    assert chunks(http, CHAT, {**body, "verbose": True})[-1]["__verbose"]["prompt"] == prompt
    assert "__verbose" not in http.post(CHAT, json=body).json()


def test_two_ends_of_a_prompt_are_refused(http: httpx.Client) -> None:
    said = [*HELLO, {"role": "assistant", "content": "hi"}]
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert http.post(CHAT, json={"messages": said, **both}).status_code == 400


def test_a_rate_counts_the_steps_after_the_first_token(http: httpx.Client) -> None:
    one = complete(http, TEXTS[0], n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (
        1,
        0,
        0,
    )
    six = complete(http, TEXTS[0])["timings"]
    assert six["predicted_per_token_ms"] == pytest.approx(six["predicted_ms"] / 5)


def test_an_idle_slot_decodes_nothing(http: httpx.Client) -> None:
    complete(http, TEXTS[0])
    used = [slot for slot in http.get("/slots").json() if "next_token" in slot]
    assert [slot["next_token"][0]["n_decoded"] for slot in used] == [0] * len(used)
