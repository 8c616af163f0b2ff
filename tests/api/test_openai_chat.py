"""Chat completions over HTTP, on a real engine, read by OpenAI's own types."""

import base64
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.requests import PLAIN, chat, chat_body, chunks, contents, frames, prompt_of

pytestmark = [pytest.mark.mlx, pytest.mark.net]

PATH = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hello"}]


def test_b1_sdk_reads_a_whole_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="gpt-9", messages=USER, max_tokens=6, extra_body=PLAIN
    )
    assert answer.model == "gpt-9"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_b1_every_field_is_of_the_sdk_type(http: httpx.Client) -> None:
    body = chat(http, logprobs=True, top_logprobs=3)
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.id.startswith("chatcmpl-")
    assert len(parsed.id) == len("chatcmpl-") + 32


def test_b2_stream_is_chunked_per_token_and_ends_with_done(http: httpx.Client) -> None:
    sent = frames(http, PATH, chat_body(max_tokens=20, ignore_eos=True))
    assert sent[-1] == "[DONE]"
    found = [json.loads(data) for data in sent[:-1]]
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert len({chunk["id"] for chunk in found}) == 1
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert len(list(contents(found))) >= 10
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(chunk.get("usage") for chunk in found)


def test_b2_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = chat(http, max_tokens=24)["choices"][0]["message"]["content"]
    assert "".join(contents(chunks(http, PATH, chat_body(max_tokens=24)))) == whole


def test_b2_usage_comes_last_when_asked_for(http: httpx.Client) -> None:
    found = chunks(http, PATH, chat_body(stream_options={"include_usage": True}))
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 8
    assert found[-1]["timings"]["predicted_n"] == 8
    assert all(chunk["usage"] is None for chunk in found[:-1])


def test_usage_so_far_is_in_every_chunk_for_clients_of_vllm(http: httpx.Client) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(http, PATH, chat_body(stream_options=asked))
    last = found[-1]["usage"]
    assert (last["completion_tokens"], found[-2]["usage"]) == (8, last)
    counted = [chunk["usage"] for chunk in found if contents([chunk]) and chunk["usage"]]
    assert {one["prompt_tokens"] for one in counted} == {last["prompt_tokens"]}
    n_tokens = [one["completion_tokens"] for one in counted]
    assert n_tokens == sorted(n_tokens) and n_tokens[0] == 1
    alone = chunks(http, PATH, chat_body(stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in alone)


def test_sdk_streams(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="tiny", messages=USER, max_tokens=6, extra_body=PLAIN
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.current_completion_snapshot
    assert "content.delta" in kinds
    assert final.choices[0].message.content


def test_b13_reasoning_is_separate_and_counted(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=12, chat_template_kwargs={}, ignore_eos=True)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    assert "<think>" not in message["reasoning_content"] + message["content"]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_b14_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    whole = chat(http, max_tokens=40)["choices"][0]["message"]["content"]
    word = whole[9:12]
    stopped = chat(http, max_tokens=40, stop=[word, "never said"])
    text = stopped["choices"][0]["message"]["content"]
    assert text == whole[: whole.index(word)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 40


def test_b14_seed_repeats_and_differs(http: httpx.Client) -> None:
    def say(seed: int) -> str:
        body = {**chat_body(max_tokens=16, seed=seed), "temperature": 1.5}
        answer = http.post(PATH, json=body).json()
        return answer["choices"][0]["message"]["content"]

    assert say(7) == say(7)
    assert len({say(seed) for seed in range(4)}) > 1


def test_logit_bias_forbids_and_forces(http: httpx.Client) -> None:
    forced = chat(http, max_tokens=3, logit_bias={"80": 1000}, logprobs=True)
    assert [one["id"] for one in forced["choices"][0]["logprobs"]["content"]] == [80] * 3


def test_logprobs_have_one_entry_per_token(http: httpx.Client) -> None:
    entries = chat(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert entry["id"] == entry["top_logprobs"][0]["id"], "greedy takes the best"


def test_logprobs_of_a_stream_are_those_of_the_whole(http: httpx.Client) -> None:
    body = chat_body(logprobs=True)
    whole = http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in chunks(http, PATH, body)
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [one["id"] for one in streamed] == [one["id"] for one in whole]


def test_progress_reaches_the_whole_prompt(http: httpx.Client) -> None:
    body = chat_body(prompt_of(150, seed=77), return_progress=True, max_tokens=2)
    progress = [c["prompt_progress"] for c in chunks(http, PATH, body) if "prompt_progress" in c]
    done = [one["processed"] for one in progress]
    assert done == sorted(done)
    assert done[0] == progress[0]["cache"] == 0
    assert done[-1] == progress[0]["total"]


def test_d12_headers_agree_with_usage(http: httpx.Client) -> None:
    text = prompt_of(80)
    for is_stream in (False, True):
        for _ in range(2):
            body = chat_body(text, stream=is_stream, max_tokens=2)
            with http.stream("POST", PATH, json=body) as answer:
                answer.read()
            found = answer.headers
            prefix = int(found["x-mlx-stack-cache-prefix-tokens"])
            new = int(found["x-mlx-stack-cache-new-tokens"])
            assert found["x-mlx-stack-cache-hit"] == ("true" if prefix else "false")
            assert int(found["x-mlx-stack-ttft-saved-ms"]) >= 0
            assert new >= 0 and prefix + new > 80
            assert found["x-mlx-stack-slot"] in "012"
    assert prefix > 0
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"


def test_b3_a_session_finds_its_cache(http: httpx.Client) -> None:
    first = http.post(PATH, json=chat_body(prompt_of(60), session_id="s.1"))
    assert first.headers["x-mlx-stack-agent"] == "s.1"
    again = chat(http, prompt_of(60) + " more", session_id="s.1")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 60


def test_cache_prompt_false_reuses_nothing(http: httpx.Client) -> None:
    chat(http, prompt_of(60))
    again = chat(http, prompt_of(60), cache_prompt=False)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_b4_id_slot_pins(http: httpx.Client) -> None:
    for slot in (2, 0, 1):
        answer = http.post(PATH, json=chat_body(id_slot=slot))
        assert answer.headers["x-mlx-stack-slot"] == str(slot)
    assert http.post(PATH, json=chat_body(id_slot=-1)).status_code == 200


def test_b5_a_follow_up_lands_where_its_prefix_is(http: httpx.Client) -> None:
    chat(http, prompt_of(60, seed=1), id_slot=2)
    chat(http, prompt_of(60, seed=2), id_slot=0)
    body = chat_body(prompt_of(60, seed=1))
    said = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then"}]
    answer = http.post(PATH, json={**body, "messages": [*body["messages"], *said]})
    assert answer.headers["x-mlx-stack-slot"] == "2"


def test_o1_o2_o3_history_in_every_shape_is_accepted(http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
        {"role": "assistant", "content": "", "reasoning": "so"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "go on", "name": "ann", "unknown": {"deep": [1]}},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"$schema": "x"}}},
        {"type": "web_search"},
    ]
    more = {"store": False, "metadata": {"a": "b"}, "prompt_cache_key": "k", "verbosity": "low"}
    answer = chat(http, messages=messages, tools=tools, tool_choice="auto", **more)
    assert answer["usage"]["prompt_tokens"] > 20


def test_a_wish_for_json_is_put_into_words(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"answer_to_all": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    prompt = http.post("/apply-template", json=chat_body(response_format=wanted)).json()["prompt"]
    assert "answer_to_all" in prompt
    assert prompt.index("tell me a story") < prompt.index("answer_to_all")
    chat(http, response_format=wanted)


def test_reasoning_effort_none_switches_thinking_off(http: httpx.Client) -> None:
    def prompt(**more: Any) -> str:
        body = {"messages": USER, **more}
        return str(http.post("/apply-template", json=body).json()["prompt"])

    off = prompt(chat_template_kwargs={"enable_thinking": False})
    assert prompt(reasoning_effort="none") == off
    assert prompt(reasoning_effort="low") == prompt() != off
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(**both) == prompt()


def test_x7_json_without_a_content_type(http: httpx.Client) -> None:
    data = json.dumps(chat_body()).encode()
    assert http.post(PATH, content=data).status_code == 200
    assert http.post(PATH, content=iter([data[:20], data[20:]])).status_code == 200
    as_form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post(PATH, content=data, headers=as_form).status_code == 200


def test_alias_without_v1_and_with_a_trailing_slash(http: httpx.Client) -> None:
    assert http.post("/chat/completions?beta=true", json=chat_body()).status_code == 200
    assert http.post("/v1/chat/completions/", json=chat_body()).status_code == 200


def test_x2_a_long_body_is_read(http: httpx.Client) -> None:
    body = chat_body(metadata={"filler": base64.b64encode(bytes(9_000_000)).decode()})
    assert http.post(PATH, json=body).status_code == 200
