"""Bodies with half of a surrogate pair or a byte order mark are read."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api.request_body import decode_body, mended_body
from tests.api.running import answering
from tests.service.standin import StandIn

pytestmark = pytest.mark.net

HALVES = (r"\ud83d", r"\uDE00", r"\ude00\ud83d", "\ud83d")


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[StandIn, httpx.Client]]:
    with answering() as (engine, http):
        yield engine, http


def post(http: httpx.Client, path: str, body: str) -> httpx.Response:
    content = body.encode("utf-8", "surrogatepass")
    return http.post(path, content=content, headers={"content-type": "application/json"})


USER = {"role": "user", "content": "cut HALF here"}
PARAMETERS = {"type": "object", "properties": {"HALF": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
BODIES = {
    "/v1/chat/completions": json.dumps({"messages": [USER], "tools": TOOLS}),
    "/v1/responses": json.dumps({"input": "cut HALF", "instructions": "HALF"}),
    "/v1/messages": json.dumps({"max_tokens": 4, "system": "HALF", "messages": [USER]}),
    "/v1/completions": json.dumps({"prompt": "cut HALF here"}),
    "/completion": json.dumps({"prompt": "cut HALF here"}),
    "/api/chat": json.dumps({"messages": [USER]}),
    "/api/generate": json.dumps({"prompt": "cut HALF here", "HALF": 1}),
    "/v1/agents/a/generate": json.dumps({"append": [USER]}),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("path", BODIES)
def test_half_a_pair_is_read_as_the_replacement_character(
    stage: tuple[StandIn, httpx.Client], path: str, half: str
) -> None:
    engine, http = stage
    answer = post(http, path, BODIES[path].replace("HALF", half))
    assert answer.status_code == 200, answer.text
    assert "\ufffd" in engine.tokenizer.decode(list(engine.asked[-1].tokens))


def test_half_a_pair_in_an_older_result_ends_no_session(
    stage: tuple[StandIn, httpx.Client],
) -> None:
    calls = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "log HALF"}]
    turns = [("user", "x"), ("assistant", calls), ("user", results), ("assistant", "Fine.")]
    messages = [{"role": role, "content": content} for role, content in (*turns, ("user", "and?"))]
    body = json.dumps({"max_tokens": 4, "messages": messages}).replace("HALF", r"\ud83d")
    assert post(stage[1], "/v1/messages", body).status_code == 200
    counted = post(stage[1], "/v1/messages/count_tokens", body)
    assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("path", BODIES)
def test_a_byte_order_mark_is_skipped(stage: tuple[StandIn, httpx.Client], path: str) -> None:
    for begin in ("\ufeff", "\ufeff\ufeff"):
        answer = post(stage[1], path, begin + BODIES[path])
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["utf-16", "utf-32", "utf-16-be", "utf-32-be"])
def test_a_mark_of_another_coding_is_obeyed(
    stage: tuple[StandIn, httpx.Client], coding: str
) -> None:
    mark = "\ufeff" if coding.endswith("be") else ""
    for path, body in BODIES.items():
        content = (mark + body).encode(coding)
        answer = stage[1].post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


def test_bad_json_keeps_its_own_error(stage: tuple[StandIn, httpx.Client]) -> None:
    for body in (r'{"messages": "\ud83d', "\ufeff{", "\ufeff"):
        answer = post(stage[1], "/v1/chat/completions", body)
        assert answer.status_code == 400, body


@given(
    st.text(st.characters(codec=None) | st.sampled_from('\\u"d8\ud83d\ude00\ud83d\n'), max_size=30)
)
def test_mending_changes_lone_halves_alone(text: str) -> None:
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for spelled in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        body = spelled.encode("utf-8", "surrogatepass")
        if spelled.isascii():
            assert decode_body(body, str) == expected
        assert "\ufffd" in decode_body(body, str) or decode_body(body, str) == text
    whole = json.dumps(expected).encode()
    assert mended_body(whole) == whole


def test_fields_are_read_from_a_body_that_needs_mending() -> None:
    class ModelField(msgspec.Struct):
        model: Any = None

    body = '\ufeff{"HALF": "HALF", "model": "tiny"}'.replace("HALF", r"\\\ud83d").encode()
    assert decode_body(body, ModelField).model == "tiny"
