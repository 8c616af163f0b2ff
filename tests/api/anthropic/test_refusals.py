"""Every refusal in Anthropic's envelope, so that clients neither repeat nor misread it."""

import socket
from typing import Any

import anthropic
import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from tests.api.anthropic.speaking import PATH, PLAIN, events
from tests.api.running import serving, standing
from tests.patience import PATIENCE_S, wait_until
from tests.service.standin import FACTS

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


def turn(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


WRONG: list[tuple[Any, str]] = [
    ({}, "messages: Field required"),
    ({"input": "hi"}, "messages: Field required; one with input belongs to /v1/responses"),
    ([], "Expected `object`, got `array`"),
    ({"messages": []}, "messages: "),
    ({"messages": "hi"}, "messages: "),
    ({"messages": [{"content": "x"}]}, "messages[0].role: Field required"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: "),
    (turn(5), "messages[0].content[0]: "),
    (turn({"text": "x"}), "messages[0].content[0].type: Field required"),
    (turn({"type": "text"}), "messages[0].content[0]: Object missing required field `text`"),
    (turn({"type": "text", "text": 5}), "messages[0].content[0].text: "),
    (turn({"type": "tool_result", "content": "x"}), "messages[0].content[0]: "),
    (
        turn({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}),
        "messages[0].content[0].content[0]: ",
    ),
    (turn(IMAGE), "messages[0].content[0]: image input is not supported by this model"),
    ({"messages": HELLO, "system": 5}, "system: "),
    ({"messages": HELLO, "max_tokens": "many"}, "max_tokens: "),
    ({"messages": HELLO, "max_tokens": -5}, "max_tokens"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature: "),
    ({"messages": HELLO, "top_p": 3}, "top_p"),
    ({"messages": HELLO, "stop_sequences": "x"}, "stop_sequences: "),
    ({"messages": HELLO, "stop_sequences": [5]}, "stop_sequences[0]: "),
    ({"messages": HELLO, "thinking": True}, "thinking: "),
    ({"messages": HELLO, "thinking": {}}, "thinking.type: Field required"),
    ({"messages": HELLO, "tools": [{"description": "x"}]}, "tools[0].name: Field required"),
    ({"messages": HELLO, "tools": [{"name": "x", "input_schema": "y"}]}, "tools[0].input_schema: "),
    (
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].name: Field required, and the others beside it, not in `function`",
    ),
    ({"messages": HELLO, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"messages": HELLO, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: "),
    ({"messages": HELLO, "tool_choice": {"type": "any"}}, "tool_choice requires a tool call"),
    ({"messages": HELLO, "id_slot": 99}, "id_slot"),
]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize(("sent", "text"), WRONG)
def test_wrong_bodies_are_400_with_the_path(http: httpx.Client, sent: Any, text: str) -> None:
    answer = http.post(PATH, json=sent)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(text)
    assert body["request_id"] == answer.headers["request-id"]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"messages":"\\ud800"}'])
def test_x7_bad_json_is_400(http: httpx.Client, data: bytes) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = http.post(path, content=data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"


@pytest.mark.mlx
@pytest.mark.net
def test_b15_an_overlong_prompt_is_told_in_the_words_clients_know(
    claude: anthropic.Anthropic,
) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="tiny", messages=long, max_tokens=9)
    body: Any = refused.value.body
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert body["error"]["message"].endswith(" tokens > 1024 maximum")
    n_tokens = claude.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert f" {n_tokens} tokens" in body["error"]["message"]


@pytest.mark.mlx
@pytest.mark.net
def test_x3_unknown_paths_and_methods_wear_the_envelope(http: httpx.Client) -> None:
    for method, path in (("POST", f"{PATH}/nope"), ("GET", PATH), ("PUT", f"{PATH}/count_tokens")):
        answer = http.request(method, path)
        assert answer.status_code == (404 if "nope" in path else 405)
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.net
def test_e18_a_full_queue_is_529_before_the_stream() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.is_full = True
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        anthropic.Anthropic(base_url=found.url, api_key="x", max_retries=0) as claude,
    ):
        for is_stream in (False, True):
            with pytest.raises(anthropic.APIStatusError) as refused:
                claude.messages.create(model="m", messages=HELLO, max_tokens=9, stream=is_stream)
            assert refused.value.status_code == 529
            assert refused.value.response.headers["retry-after"] == "3"
            body: Any = refused.value.body
            assert body["error"]["type"] == "overloaded_error"


@pytest.mark.net
def test_a33_a_failure_inside_a_stream_is_told_in_it() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = None
    sent = {"model": "m", "messages": HELLO, "max_tokens": 9, "stream": True, **PLAIN}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        httpx.stream("POST", found.url + PATH, json=sent, timeout=PATIENCE_S) as answer,
    ):
        pieces = answer.iter_text()
        text = next(pieces)
        engine.is_dead = True
        text += "".join(pieces)
    told = events(text)
    assert [event["type"] for event in told] == ["message_start", "error"]
    assert told[-1]["error"]["type"] == "api_error"
    assert "died" in told[-1]["error"]["message"]
    assert told[-1]["request_id"] == answer.headers["request-id"]


@pytest.mark.net
def test_the_client_raises_on_an_error_event() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = None
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        anthropic.Anthropic(base_url=found.url, api_key="x", max_retries=0) as claude,
    ):
        stream = claude.messages.create(model="m", messages=HELLO, max_tokens=9, stream=True)
        assert next(stream).type == "message_start"
        engine.is_dead = True
        with pytest.raises(anthropic.APIStatusError, match="died"):
            list(stream)


@pytest.mark.net
def test_x11_keys_in_both_headers_and_a_loading_model() -> None:
    service, engine = standing(ServerSpec(port=0, api_keys=("k",), strict_models=True))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener, is_loaded=False) as found,
    ):
        url = found.url + PATH
        sent = {"model": "standin", "messages": HELLO, "max_tokens": 9}
        loading = httpx.post(url, json=sent, headers={"x-api-key": "k"})
        assert loading.status_code == 503
        assert loading.json()["error"]["type"] == "api_error"
        engine.loading.set_result(FACTS)
        wait_until(lambda: httpx.get(found.url + "/health").status_code == 200)
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            assert httpx.post(url, json=sent, headers=headers).status_code == 200
        refused = httpx.post(url, json=sent)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        other = httpx.post(url, json={**sent, "model": "o9"}, headers={"x-api-key": "k"})
        assert other.status_code == 404
        assert other.json()["error"]["type"] == "not_found_error"
