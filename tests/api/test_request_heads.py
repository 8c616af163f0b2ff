"""Request heads: absolute targets, two lengths, upgrades, paths that routers join."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api import connection_limits
from mlxstack.api.connection_limits import canonical_path
from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body
from tests.api.running import Running, tiny_preset
from tests.api.test_connection_limits import answer_of, until
from tests.gateway.gateway_thread import WAYS, running_behind
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture(scope="module", params=WAYS)
def here(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = tiny_preset(model_folder, server=ServerSpec(port=0))
    with running_behind(request.param, preset, tmp_path_factory.mktemp("heads")) as found:
        yield found


def sent(here: Running, data: bytes) -> socket.socket:
    found = socket.create_connection(
        ("127.0.0.1", httpx.URL(here.url).port or 0), timeout=PATIENCE_S
    )
    found.sendall(data)
    return found


def request_of(target: str, body: object, host: str = "localhost", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {target} HTTP/{version}\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def test_a_request_line_with_the_whole_url_is_the_request_of_its_path(here: Running) -> None:
    with sent(here, request_of(f"http://localhost:1{CHAT}?a=b", chat_body())) as client:
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 200") and b"chat.completion" in answer


def test_the_host_of_the_request_line_counts_and_not_that_of_the_header(here: Running) -> None:
    for target, host, status in (
        (f"http://evil.example{CHAT}", "localhost", b"403"),
        (f"HTTP://user@LocalHost:99{CHAT}", "evil.example", b"200"),
        (f"http://[evil{CHAT}", "localhost", b"404"),
    ):
        with sent(here, request_of(target, chat_body(), host)) as client:
            assert answer_of(client).split(b" ")[1] == status


@pytest.mark.parametrize("path", ["/v1/responses", "/slots", "/v1/messages", "/nowhere"])
def test_an_upgrade_to_a_websocket_is_a_426_in_the_dialect_of_its_path(
    here: Running, path: str
) -> None:
    with sent(here, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + UPGRADE) as client:
        head, _, body = answer_of(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 426 Upgrade Required") and b"upgrade: HTTP/1.1" in head
    assert "WebSockets" in json.loads(body)["error"]["message"]
    among = UPGRADE.replace(b"Upgrade: websocket", b"Upgrade: h2c, WebSocket/13")
    with sent(here, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + among) as client:
        assert answer_of(client).startswith(b"HTTP/1.1 426")


def test_an_upgrade_to_another_protocol_is_ignored(here: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
    with sent(here, head + b"Upgrade: h2c\r\n\r\n") as client:
        assert answer_of(client).startswith(b"HTTP/1.1 200")


def test_two_lengths_are_refused_and_the_connection_is_closed(here: Running) -> None:
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n".encode()
    with sent(here, head + b"Transfer-Encoding: chunked\r\n\r\n" + smuggled) as client:
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n", b"\n"])
def test_empty_lines_before_a_request_line_are_ignored(here: Running, empty: bytes) -> None:
    """RFC 9112, 2.2: some clients end a body with an empty line, and reuse the connection."""
    kept = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = request_of(CHAT, chat_body()).replace(b"Connection: close\r\n", b"")
    with sent(here, empty + kept + empty + body + empty + request_of(CHAT, chat_body())) as client:
        answer = answer_of(client)
    assert answer.count(b"HTTP/1.1 200") == 3 and b"HTTP/1.1 400" not in answer


HEALTH = b"GET /health%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
LONG = {
    "request line": HEALTH % (b"?" + b"a" * 70_000, b""),
    "one header": HEALTH % (b"", b"X: " + b"a" * 70_000 + b"\r\n"),
    "many headers": HEALTH % (b"", b"".join(b"X%d: 1\r\n" % i for i in range(10_000))),
    "empty lines": b"\r\n" * 50_000 + HEALTH % (b"", b""),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_head_is_refused_though_it_is_whole(here: Running, name: str) -> None:
    with sent(here, LONG[name]) as client:
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"shorten them" in answer


@pytest.mark.parametrize("version", ["0.9", "2.0", "9.9"])
def test_another_version_of_http_is_refused(here: Running, version: str) -> None:
    with sent(here, request_of(CHAT, chat_body(), version=version)) as client:
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"speaks HTTP/1.1" in answer


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_closes_its_sending_side_reads_the_whole_answer(
    here: Running, is_stream: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "PROBE_S", 0.02)
    body = {**chat_body(max_tokens=40, ignore_eos=True), "stream": is_stream}
    with sent(here, request_of(CHAT, body, version=version)) as client:
        client.shutdown(socket.SHUT_WR)
        answer = answer_of(client)
    # Interim responses tell a client that is there from one that has left.
    answer = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert (b"[DONE]" if is_stream else b'"object":"chat.completion"') in content
    until(lambda: here.service.gate.n_inside == 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    here: Running, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "PROBE_S", 0.02)
    body = {**chat_body(max_tokens=-1, ignore_eos=True), "stream": is_stream}
    for _ in range(2):
        with sent(here, request_of(CHAT, body)):
            until(lambda: here.service.gate.n_inside == 1)
        until(lambda: here.service.gate.n_inside == 0)


@pytest.mark.parametrize(
    "path",
    ["//v1//chat/completions", "/v1/./chat/completions/", "/x/../v1/chat%2Fcompletions", CHAT],
)
def test_every_spelling_of_a_path_is_the_path(here: Running, path: str) -> None:
    with sent(here, request_of(path, chat_body())) as client:
        assert answer_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/messages", "POST"),
        ("/v1/responses", "POST"),
        ("/api/chat", "POST"),
        ("/completion", "POST"),
        ("/v1/agents/bob/generate", "POST"),
        ("/tokenize", "POST"),
    ],
)
def test_a_method_that_a_path_lacks_is_a_405_with_those_it_has(
    here: Running, path: str, allowed: str
) -> None:
    answer = httpx.get(here.url + path)
    assert answer.status_code == 405
    assert allowed in answer.headers["allow"] and f"{path} takes {allowed}, not GET" in answer.text


@given(st.text(st.sampled_from("/.a%"), max_size=12))
def test_a_canonical_path_is_its_own_canonical_path(text: str) -> None:
    path = canonical_path("/" + text)
    assert path.startswith("/") and "//" not in path and canonical_path(path) == path
    assert path == "/" or not path.endswith("/")
    assert not {".", ".."} & set(path.split("/"))
