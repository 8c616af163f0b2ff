"""Every error in the words and the envelope of the caller's dialect."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxstack.api import errors as table
from mlxstack.api.errors import headers
from mlxstack.api.protocols import ANTHROPIC, BARE_CHAT, LLAMA_SERVER, OPENAI, Dialect
from mlxstack.api.registry import dialect_of
from mlxstack.core import errors

HELLO = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
SERVICE_FAULTS = {"Broken", "DeviceError", "DoesNotFit", "SetupError", "StackError"}


def family(root: type[errors.StackError]) -> Iterator[type[errors.StackError]]:
    yield root
    for child in root.__subclasses__():
        yield from family(child)


def test_an_error_has_a_row_where_it_differs_from_its_kind() -> None:
    for kind in family(errors.StackError):
        if kind in table.ERRORS and kind is not errors.StackError:
            above = next(cls for cls in kind.__mro__[1:] if cls in table.ERRORS)
            assert table.ERRORS[kind] != table.ERRORS[above], kind
    assert set(table.ERRORS) <= set(family(errors.StackError))


def test_no_other_error_is_a_500() -> None:
    # A new kind of error needs a row, or stands here.
    found = {
        kind
        for kind in family(errors.StackError)
        if next(cls for cls in kind.__mro__ if cls in table.ERRORS) is errors.StackError
    }
    assert {one.__name__ for one in found} == SERVICE_FAULTS


@pytest.mark.parametrize(
    ("error", "openai_status", "anthropic_status", "llama_type"),
    [
        (errors.Busy("full", 7), 503, 529, "unavailable_error"),
        (errors.OutOfMemory("full", 7), 503, 529, "unavailable_error"),
        (errors.Unsupported("off"), 501, 400, "not_supported_error"),
        (errors.TooLarge("big"), 413, 413, "invalid_request_error"),
        (errors.TooLong(9, 8), 400, 400, "exceed_context_size_error"),
        (errors.Unauthorized("no"), 401, 401, "authentication_error"),
        (errors.UnknownModel("no"), 404, 404, "not_found_error"),
        (errors.Loading("wait"), 503, 503, "unavailable_error"),
        (errors.Broken("oh"), 500, 500, "server_error"),
    ],
)
def test_statuses(
    error: errors.StackError, openai_status: int, anthropic_status: int, llama_type: str
) -> None:
    assert OPENAI.status(error) == openai_status
    assert ANTHROPIC.status(error) == anthropic_status
    assert LLAMA_SERVER.error_body(error, "")["error"]["type"] == llama_type


def test_x23_headers_say_when_to_come_again() -> None:
    assert headers(errors.Busy("full", 7.4)) == {"retry-after": "8"}
    assert headers(errors.Busy("full", 0.1)) == {"retry-after": "1"}
    assert "retry-after" in headers(errors.Loading("wait"))
    assert headers(errors.Broken("oh")) == {"x-should-retry": "false"}
    assert headers(errors.BadRequest("no")) == {}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/responses", OPENAI),
        ("/chat/completions", BARE_CHAT),
        ("/v1/models/a/b", OPENAI),
        ("/completions", LLAMA_SERVER),
        ("/slots/0", LLAMA_SERVER),
        ("/nope", LLAMA_SERVER),
    ],
)
def test_dialects_by_path(path: str, expected: Dialect) -> None:
    assert dialect_of(path).error_body is expected.error_body


def test_anthropic_envelope() -> None:
    assert ANTHROPIC.error_body(errors.TooLong(9, 8), "req_1") == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 9 tokens > 8 maximum",
        },
        "request_id": "req_1",
    }


WRONG: list[tuple[Any, str | None]] = [
    ({}, "messages"),
    ([], None),
    ("text", None),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": -7}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": "many"}, "max_tokens"),
    ({"messages": HELLO, "top_p": 3}, "top_p"),
    ({"messages": HELLO, "min_p": -1}, "min_p"),
    ({"messages": HELLO, "repeat_penalty": 0}, "repeat_penalty"),
    ({"messages": HELLO, "stop": 5}, "stop"),
    ({"messages": HELLO, "stop": [5]}, "stop[0]"),
    ({"messages": HELLO, "id_slot": 99}, "id_slot"),
    ({"messages": HELLO, "id_slot": -2}, "id_slot"),
    ({"messages": HELLO, "n": 99}, "n"),
    ({"messages": HELLO, "logit_bias": {"": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"999999": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": [[1, 2, 3]]}, "logit_bias"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "session_id": "a/b"}, "session_id"),
    ({"messages": HELLO, "session_id": ""}, "session_id"),
    ({"messages": HELLO, "tool_choice": "maybe"}, "tool_choice"),
    (
        {"messages": HELLO, "tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
    ),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HELLO, "tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": {}}, "tool_choice"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": "no"}},
        "chat_template_kwargs",
    ),
]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize(("sent", "param"), WRONG)
def test_wrong_bodies_are_400_and_name_the_field(
    http: httpx.Client, sent: Any, param: str | None
) -> None:
    answer = http.post(CHAT, json=sent)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"{bad", b"\xff\xfe",
        b'{"messages":[{"role":"user","content":"caf\xe9"}],"prompt":"caf\xe9","max_tokens":5}',
    ],
)  # fmt: skip
def test_x7_bad_json_is_400_everywhere(http: httpx.Client, data: bytes) -> None:
    paths = CHAT, "/v1/completions", "/completion", "/slots/0?action=save", "/v1/messages"
    for path in (*paths, "/v1/responses", "/v1/responses/input_tokens", "/cache/warm"):
        answer = http.post(path, content=data)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.mlx
@pytest.mark.net
def test_strange_numbers_are_no_500(http: httpx.Client) -> None:
    for more in (
        {"seed": 10**40},
        {"seed": -1},
        {"top_k": 10**9},
        {"top_k": -1},
        {"top_p": 0},
        {"repeat_last_n": -1, "repeat_penalty": 1.1},
        {"repeat_last_n": 0, "repeat_penalty": 1.1},
        {"repeat_last_n": 10**12, "presence_penalty": 2.0},
        {"max_tokens": 10**30, "n_predict": 2},
        {"logit_bias": {"5": -1e308}},
        {"logit_bias": [[5, False]]},
        {"temperature": -3},
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"presence_penalty": None, "stop": None, "tools": None, "logit_bias": None},
        {"stop": ["", "x" * 1000]},
    ):
        sent = {"messages": HELLO, "max_tokens": 2, "temperature": 1.0, **more}
        answer = http.post(CHAT, json=sent)
        assert answer.status_code == 200, (more, answer.text)


@pytest.mark.mlx
@pytest.mark.net
def test_b15_o8_an_overlong_prompt_is_named_with_its_numbers(http: httpx.Client) -> None:
    slots = http.get("/slots").json()
    long = "word " * 3000
    error = http.post(CHAT, json={"messages": [{"role": "user", "content": long}]}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 1024
    assert error["n_prompt_tokens"] > 1024
    assert str(error["n_prompt_tokens"]) in error["message"]
    native = http.post("/completion", json={"prompt": long})
    assert native.status_code == 400
    assert native.json()["error"]["type"] == "exceed_context_size_error"
    assert native.json()["error"]["code"] == 400
    after = http.get("/slots").json()
    assert [s["n_tokens"] for s in after] == [s["n_tokens"] for s in slots]


@pytest.mark.mlx
@pytest.mark.net
def test_sdk_raises_its_own_exceptions(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.responses.retrieve("resp_1")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.completions.create(model="m", prompt="x", top_p=7)
    assert wrong.value.param == "top_p"


@pytest.mark.mlx
@pytest.mark.net
def test_x3_no_default_bodies(http: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/slots/0", 405),
        ("POST", "/v1/nope", 404), ("POST", "/v1/messages/nope", 404), ("PUT", "/health", 405),
        ("GET", "/slots/0", 405),
    ):  # fmt: skip
        answer = http.request(method, path)
        assert answer.status_code == status
        assert "error" in answer.json()
        assert "status_code" not in answer.json()


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("GET", CHAT, f"{CHAT} takes POST, not GET"),
        ("POST", "/v1/v1/chat/completions", "leave one /v1 out of the client's base URL"),
        ("GET", "/nope", "there is no GET /nope"),
        ("POST", "/slots/0?action=dance", "save, restore or erase"),
        ("POST", "/infill", "no fill-in-the-middle"),
    ],
)
def test_what_is_not_here_is_told(http: httpx.Client, method: str, path: str, text: str) -> None:
    answer = http.request(method, path)
    assert 400 <= answer.status_code <= 501
    assert text in answer.json()["error"]["message"]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("path", ["/", "/health", "/v1/health", "/v1/models", "/models"])
def test_head_has_the_status_of_get_and_no_body(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (http.get(path).status_code, b"")
