"""Messages over HTTP, on a real engine, read by Anthropic's own client and types."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ModelInfo
from pydantic import TypeAdapter

from tests.api.anthropic.speaking import (
    PATH,
    PLAIN,
    ask,
    blocks,
    body,
    n_prompt,
    nothing_unknown,
    stream,
)
from tests.api.requests import prompt_of
from tests.api.running import Running

pytestmark = [pytest.mark.mlx, pytest.mark.net]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_b8_the_client_reads_a_whole_answer(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="claude-anything", messages=HELLO, max_tokens=6, extra_body=PLAIN
    )
    assert answer.model == "claude-anything"
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 6
    assert answer.id.startswith("msg_")
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


def test_a_limit_of_0_computes_the_prompt_alone(claude: anthropic.Anthropic) -> None:
    """Anthropic's documented call to warm a cache: the next request finds the prompt."""
    story: list[Any] = [{"role": "user", "content": "tell me of the sea " * 20}]
    warmed, found = (
        claude.messages.create(model="m", messages=story, max_tokens=most, extra_body=PLAIN)
        for most in (0, 1)
    )
    assert (warmed.stop_reason, warmed.usage.output_tokens) == ("max_tokens", 0)
    assert warmed.usage.input_tokens > 100
    assert found.usage.input_tokens < 10 and found.usage.cache_read_input_tokens


def test_b8_the_client_streams(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="tiny", messages=HELLO, max_tokens=20, extra_body=PLAIN
    ) as found:
        texts = list(found.text_stream)
        final = found.get_final_message()
    assert len(texts) > 5
    assert final.content[0].type == "text"
    assert final.content[0].text == "".join(texts)
    assert final.usage.output_tokens == 20


async def test_b8_the_async_client(live: Running, http: httpx.Client) -> None:
    async with anthropic.AsyncAnthropic(base_url=live.url, auth_token="t", max_retries=0) as claude:
        whole = await claude.messages.create(
            model="tiny", messages=HELLO, max_tokens=9, extra_body=PLAIN
        )
        async with claude.messages.stream(
            model="tiny", messages=HELLO, max_tokens=9, extra_body=PLAIN
        ) as found:
            final = await found.get_final_message()
        raw = await claude.messages.create(
            model="tiny", messages=HELLO, max_tokens=9, stream=True, extra_body=PLAIN
        )
        kinds = [event.type async for event in raw]
        count = await claude.messages.count_tokens(model="tiny", messages=HELLO, extra_body=PLAIN)
    assert final.to_dict()["content"] == whole.to_dict()["content"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    usage = whole.usage.to_dict()
    assert count.input_tokens == n_prompt(usage)  # type: ignore[arg-type]


@pytest.mark.parametrize("thinking", ["disabled", "enabled", "adaptive", "between_tools"])
def test_a31_stream_and_whole_say_the_same(http: httpx.Client, thinking: str) -> None:
    sent = body(max_tokens=40, thinking={"type": thinking, "budget_tokens": 1024})
    whole = ask(http, sent)
    nothing_unknown(Message.model_validate_json(json.dumps(whole), strict=True))
    found = stream(http, sent)
    assert blocks(found) == whole["content"]
    last = next(event for event in found if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == whole["stop_reason"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 40
    assert n_prompt(last["usage"]) == n_prompt(whole["usage"])
    kinds = {block["type"] for block in whole["content"]}
    assert ("thinking" in kinds) is (thinking != "disabled")


def test_a20u_usage_adds_up_and_shows_the_cache(http: httpx.Client) -> None:
    cold = ask(http, body(prompt_of(60)))["usage"]
    warm = ask(http, body(prompt_of(60)))["usage"]
    assert all(type(value) is int for value in [*cold.values(), *warm.values()])
    assert cold["cache_read_input_tokens"] == 0
    assert warm["cache_read_input_tokens"] == n_prompt(warm)
    assert n_prompt(cold) == n_prompt(warm)
    streamed = stream(http, body(prompt_of(60)))
    start = streamed[0]["message"]["usage"]
    assert start == {**warm, "output_tokens": 1}


def test_d12_cache_headers_are_sent(http: httpx.Client) -> None:
    for is_stream in (False, True):
        with http.stream("POST", PATH, json=body(stream=is_stream)) as answer:
            answer.read()
        prefix = int(answer.headers["x-mlx-stack-cache-prefix-tokens"])
        assert answer.headers["x-mlx-stack-cache-hit"] == ("true" if prefix else "false")
    assert prefix > 0


def test_a3_request_ids_agree(http: httpx.Client) -> None:
    answer = http.post(PATH, json={})
    assert answer.headers["request-id"] == answer.json()["request_id"]
    assert len(answer.headers["request-id"]) >= len("req_") + 24


def test_a1_any_version_any_beta_any_field(http: httpx.Client) -> None:
    more = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": None, "service_tier": "auto", "speed": "fast", "mcp_servers": [],
        "safeguards": {"x": [1]}, "betas": ["a"], "metadata": {"user_id": "u"},
        "diagnostics": {}, "inference_geo": "eu", "cache_control": {"type": "ephemeral"},
        "output_config": {"effort": "unheard-of", "more": 1},
        "thinking": {"type": "disabled", "display": "omitted"},
    }  # fmt: skip
    for version in ({}, {"anthropic-version": "2023-06-01"}, {"anthropic-version": "2026-10-21"}):
        beta = {"anthropic-beta": "never-heard-of-2030-01-01,token-counting-2024-11-01"}
        answer = http.post(f"{PATH}?beta=true", json=body(**more), headers={**version, **beta})
        assert answer.status_code == 200, answer.text
    assert http.post(f"{PATH}/", json=body()).status_code == 200


def test_a2_without_sampling_fields_the_preset_decides(live: Running, http: httpx.Client) -> None:
    sent = body(max_tokens=12)
    del sent["temperature"]
    answers = {json.dumps(ask(http, sent)["content"]) for _ in range(4)}
    assert len(answers) > 1, "neither preset nor model say anything, so that it is sampled"
    assert len({json.dumps(ask(http, body(max_tokens=12))["content"]) for _ in range(2)}) == 1


def test_max_tokens_is_clamped_to_the_context(http: httpx.Client) -> None:
    answer = ask(http, body(prompt_of(200), max_tokens=32000, ignore_eos=True))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert n_prompt(answer["usage"]) + answer["usage"]["output_tokens"] == 1024
    sent = body(prompt_of(200), ignore_eos=True)
    del sent["max_tokens"]
    assert ask(http, sent)["stop_reason"] == "model_context_window_exceeded"


def test_a23u_a_stop_sequence_is_named(http: httpx.Client) -> None:
    whole = ask(http, body(max_tokens=40))["content"][0]["text"]
    word = whole[9:12]
    sent = body(max_tokens=40, stop_sequences=["", "never said", word])
    stopped = ask(http, sent)
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["stop_sequence"] == word
    assert stopped["content"][0]["text"] == whole[: whole.index(word)]
    last = next(event for event in stream(http, sent) if event["type"] == "message_delta")
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": word}


def test_a22u_an_empty_answer_has_a_block(http: httpx.Client) -> None:
    word = ask(http, body(max_tokens=8))["content"][0]["text"][0]
    sent = body(stop_sequences=[word])
    assert ask(http, sent)["content"] == [{"type": "text", "text": ""}]
    assert blocks(stream(http, sent)) == [{"type": "text", "text": ""}]


def test_a14_prefill_is_continued(http: httpx.Client) -> None:
    whole = ask(http, body(max_tokens=24))["content"][0]["text"]
    opened = body(max_tokens=24)
    opened["messages"].append({"role": "assistant", "content": whole[:10]})
    rest = ask(http, opened)["content"][0]["text"]
    assert not rest.startswith(whole[:10]), "only the continuation comes"
    prompt = ask(http, opened)["usage"]
    plain = ask(http, body())["usage"]
    assert n_prompt(prompt) > n_prompt(plain)


def test_a14_a_last_message_that_calls_a_tool_is_refused(http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    sent = body()
    sent["messages"].append({"role": "assistant", "content": [call]})
    answer = http.post(PATH, json=sent)
    assert answer.status_code == 400
    assert "tool_result" in answer.json()["error"]["message"]
    assert http.post(f"{PATH}/count_tokens", json=sent).status_code == 200


def test_id_slot_and_session_are_understood(http: httpx.Client) -> None:
    for slot in (2, 0):
        answer = http.post(PATH, json=body(id_slot=slot, session_id="s.1"))
        assert answer.headers["x-mlx-stack-slot"] == str(slot)
        assert answer.headers["x-mlx-stack-agent"] == "s.1"


def test_timings_are_no_part_of_this_dialect(http: httpx.Client) -> None:
    assert set(ask(http, body())) == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage",
    }  # fmt: skip


def test_models_are_read_by_the_client(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    (model,) = [one for one in claude.models.list(limit=1000) if one.id == "tiny"]
    assert model.max_input_tokens == 1024
    assert model.model_dump()["context_length"] == model.model_dump()["max_model_len"] == 1024
    assert claude.models.retrieve("tiny").display_name == "tiny"
    adapter = TypeAdapter(ModelInfo)
    for raw in http.get("/v1/models?limit=1000").json()["data"]:
        adapter.validate_json(json.dumps(raw), strict=True)
    assert claude.models.retrieve("claude/any").id == "claude/any", "requests may give this name"


def test_x4_probes_find_somebody(http: httpx.Client) -> None:
    assert http.head("/").status_code == http.head("/api/hello").status_code == 200
    assert http.head("/nothing").status_code == 404
