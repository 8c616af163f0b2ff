"""What comes before a body: URL and headers are bounded, before anybody is asked for a key."""

import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from mlxstack.api.connection_limits import MAX_HEAD_BYTES
from mlxstack.core.preset import ServerSpec
from tests.api.running import Running
from tests.gateway.gateway_thread import WAYS, standing_behind
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

N_PIECES = 2048
"""16 MiB: far more than a socket keeps for who does not read."""

START = b" /tokenize HTTP/1.1\r\nhost: localhost\r\n"
HEADS = {
    "url": (b"GET /", b"a" * 8192),
    "one header": (b"GET" + START + b"x: ", b"a" * 8192),
    "many headers": (b"GET" + START, b"x: y\r\n" * 1365),
    "chunk": (b"POST" + START + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 8192),
}


@pytest.fixture(scope="module", params=WAYS)
def open_house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    spec = ServerSpec(port=0)
    folder = tmp_path_factory.mktemp("open")
    with standing_behind(request.param, spec, folder) as (found, _):
        yield found


def called(running: Running) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", urlsplit(running.url).port or 0), timeout=PATIENCE_S
    )


@pytest.mark.parametrize("name", HEADS)
def test_a_long_head_is_refused_before_it_is_whole(open_house: Running, name: str) -> None:
    begin, piece = HEADS[name]
    n_sent = 0
    with called(open_house) as line:
        try:
            line.sendall(begin)
            for _ in range(N_PIECES):
                line.sendall(piece)
                n_sent += 1
            answer = line.recv(100)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""
    assert n_sent < N_PIECES
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(open_house.url + "/health").status_code == 200


def test_who_sends_a_little_too_much_is_told(open_house: Running) -> None:
    with called(open_house) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * MAX_HEAD_BYTES)
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer.lower()


def test_garbage_after_an_answer_is_no_fault(
    open_house: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with called(open_house) as line:
        line.sendall(b"POST" + START.replace(b"localhost", b"evil.com"))
        line.sendall(b"transfer-encoding: chunked\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 403 ")
        line.sendall(b"no chunk\r\n\r\n")
        while line.recv(4096):
            pass
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("name", ["authorization", "cookie"])
def test_a_head_of_60_kb_is_read(open_house: Running, name: str) -> None:
    headers = {name: "a" * 60_000}
    assert httpx.get(open_house.url + "/health", headers=headers).status_code == 200


def test_a_long_body_in_small_chunks_is_read(open_house: Running) -> None:
    body = b'{"content": "a", "filler": "' + b"b" * 10_000_000 + b'"}'
    pieces = (body[at : at + 5000] for at in range(0, len(body), 5000))
    headers = {"content-type": "application/json"}
    answer = httpx.post(
        open_house.url + "/tokenize", content=pieces, headers=headers, timeout=PATIENCE_S
    )
    assert answer.status_code == 200


def test_expect_100_continue_and_the_next_request_on_the_line(open_house: Running) -> None:
    body = b'{"content": "a"}'
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\ncontent-length: 16\r\n\r\n"
    )
    with called(open_house) as line:
        for _ in range(2):
            line.sendall(head)
            assert line.recv(4096).startswith(b"HTTP/1.1 100 ")
            line.sendall(body)
            answer = line.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            while not answer.endswith(b"}"):
                answer += line.recv(4096)


@pytest.mark.parametrize("head", ["content-length: 100", "transfer-encoding: chunked"])
def test_who_leaves_in_the_midst_of_a_body_is_no_failure(
    open_house: Running, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    with caplog.at_level(logging.INFO):
        with called(open_house) as line:
            line.sendall(b"POST" + START + head.encode() + b"\r\n\r\n1\r\n")
        # The loop meets the end of that connection before the request of a later one.
        httpx.get(open_house.url + "/health", timeout=PATIENCE_S).raise_for_status()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
