"""Several choices for one prompt: n asks that share it, each with its own index."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxstack.api.streaming import interleaved
from mlxstack.core.errors import Broken
from mlxstack.core.response_parts import ContentPart, ResponsePart
from tests.api.requests import chat, chat_body, chunks, prompt_of
from tests.api.running import Running
from tests.api.test_concurrent_streams import n_busy, until

CHAT = "/v1/chat/completions"
LEGACY = "/v1/completions"
DRAWN = {"temperature": 1.5, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}


async def parts_of(*texts: str, left: list[str]) -> AsyncGenerator[ResponsePart, None]:
    """Parts with a pause after each, that tell when they were left."""
    try:
        for text in texts:
            yield ContentPart(text)
            await asyncio.sleep(0)
    finally:
        left.append(texts[0])


async def test_parts_come_side_by_side_with_their_index() -> None:
    found = [
        (i, part.text)
        async for i, part in interleaved([parts_of("a", "b", left=[]), parts_of("x", "y", left=[])])
        if isinstance(part, ContentPart)
    ]
    assert sorted(found) == [(0, "a"), (0, "b"), (1, "x"), (1, "y")]
    assert [i for i, _ in found] != [0, 0, 1, 1]
    assert [text for i, text in found if i == 0] == ["a", "b"]


async def test_leaving_leaves_all_of_them() -> None:
    left: list[str] = []
    parts = interleaved([parts_of("a", "b", left=left), parts_of("x", "y", left=left)])
    await anext(parts)
    await parts.aclose()
    assert sorted(left) == ["a", "x"]


async def test_one_failure_ends_them_all() -> None:
    left: list[str] = []

    async def broken() -> AsyncGenerator[ResponsePart, None]:
        yield ContentPart("fine")
        raise Broken("no more")

    with pytest.raises(Broken):
        async for _ in interleaved([parts_of(*"abcdefgh", left=left), broken()]):
            pass
    assert left == ["a"]


@pytest.mark.mlx
@pytest.mark.net
def test_n_choices_differ_and_share_their_prompt(http: httpx.Client) -> None:
    one = chat(http, **DRAWN)
    three = chat(http, n=3, **DRAWN)
    ChatCompletion.model_validate(three)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"], "counted once"
    assert three["usage"]["completion_tokens"] == 24
    assert chat(http, n=3, **DRAWN)["choices"] == three["choices"]


@pytest.mark.mlx
@pytest.mark.net
def test_the_prompt_is_computed_once(live: Running, http: httpx.Client) -> None:
    before = live.service.engine.snapshot().counters.n_prompt_tokens
    answer = chat(http, prompt_of(120), n=3, **DRAWN)
    computed = live.service.engine.snapshot().counters.n_prompt_tokens - before
    assert computed < 1.7 * answer["usage"]["prompt_tokens"]


@pytest.mark.mlx
@pytest.mark.net
def test_n_choices_of_a_stream_are_those_of_the_whole(http: httpx.Client) -> None:
    whole = chat(http, n=2, **DRAWN)
    found = chunks(http, CHAT, chat_body(n=2, **DRAWN, **USAGE))
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    for choice in whole["choices"]:
        own = [c for chunk in found for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content") or "" for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
    usages = [chunk["usage"] for chunk in found if chunk["usage"]]
    assert len(usages) == 1
    assert usages[0]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usages[0]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.mlx
@pytest.mark.net
def test_every_prompt_of_a_completion_has_n_choices(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 4, **DRAWN}
    whole = http.post(LEGACY, json=body).json()
    Completion.model_validate(whole)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    found = chunks(http, LEGACY, {**body, **USAGE})
    for choice in whole["choices"]:
        said = "".join(
            c["text"] for chunk in found for c in chunk["choices"] if c["index"] == choice["index"]
        )
        assert said == choice["text"]
    assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    assert found[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("n", [0, -1, 4])
def test_n_is_bounded_by_the_slots(http: httpx.Client, n: int) -> None:
    for path, body in ((CHAT, chat_body(n=n)), (LEGACY, {"prompt": "hi", "n": n})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


@pytest.mark.mlx
@pytest.mark.net
def test_x9_leaving_a_stream_frees_every_slot(live: Running, http: httpx.Client) -> None:
    body = chat_body(n=3, stream=True, max_tokens=700, ignore_eos=True)
    with http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        while n_busy(live.service.engine.snapshot()) < 3:
            next(lines)
    until(live, lambda s: n_busy(s) == 0)


@pytest.mark.mlx
@pytest.mark.net
def test_the_sdk_reads_n_choices(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=4, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
