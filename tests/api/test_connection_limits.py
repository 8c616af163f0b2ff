"""Connections without a whole request neither fill the service up nor stay for ever."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from mlxstack.api import connection_limits
from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body
from tests.api.running import Running, tiny_preset
from tests.gateway.gateway_thread import WAYS, running_behind
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LIMIT = 8
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: lo"
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = (
    b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
    b'content-length: 1000\r\n\r\n{"messages": ['
)


@pytest.fixture(scope="module", params=WAYS)
def here(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = tiny_preset(model_folder, server=ServerSpec(port=0))
    folder = tmp_path_factory.mktemp("connections")
    with running_behind(request.param, preset, folder) as found:
        yield found


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", LIMIT)
    monkeypatch.setattr(connection_limits, "HEAD_S", 600.0)


def opened(here: Running, data: bytes = b"") -> socket.socket:
    found = socket.create_connection(
        ("127.0.0.1", httpx.URL(here.url).port or 0), timeout=PATIENCE_S
    )
    found.sendall(data)
    return found


def answer_of(one: socket.socket) -> bytes:
    """Everything until the service closes the connection."""
    said = b""
    while data := one.recv(65536):
        said += data
    return said


@pytest.mark.usefixtures("few")
def test_idle_connections_make_room_for_new_ones(here: Running) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(opened(here, HALF_HEAD[: i % 2 * 99])) for i in range(60)]
        for _ in range(3):
            assert httpx.get(f"{here.url}/health", timeout=PATIENCE_S).status_code == 200
        assert idle[0].recv(1) == b"", "the first one was closed"
        # Connections made in the same millisecond have an order too.
        for i in range(60 - LIMIT + 1, 60):
            idle[i].sendall(WHOLE[len(HALF_HEAD) :] if i % 2 else WHOLE)
            assert idle[i].recv(65536).startswith(b"HTTP/1.1 200"), "the newest still work"


@pytest.mark.usefixtures("few")
def test_a_connection_too_many_is_refused_when_all_are_busy(here: Running) -> None:
    long = {**chat_body(max_tokens=900, ignore_eos=True), "stream": True}
    body = json.dumps(long).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        busy = [stack.enter_context(opened(here, head.encode() + body)) for _ in range(LIMIT)]
        until(lambda: here.service.gate.n_inside >= LIMIT)
        with opened(here) as late:
            told = answer_of(late)
        assert told.startswith(b"HTTP/1.1 503") and b"retry-after" in told
        assert b"too many connections" in told
        assert busy[0].recv(12) == b"HTTP/1.1 200", "who is served stays"


def test_a_head_has_a_time_limit_and_an_answer_has_none(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.3)
    with opened(here) as silent, opened(here, HALF_HEAD) as slow:
        assert answer_of(silent) == b""
        told = answer_of(slow)
        assert told.startswith(b"HTTP/1.1 408") and b"not there after 0.3 s" in told
    with opened(here, WHOLE) as again:
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        again.sendall(HALF_HEAD)
        assert b"HTTP/1.1 408" in answer_of(again), "the second request too"
    body = {**chat_body(max_tokens=300, ignore_eos=True), "stream": True}
    monkeypatch.setattr(connection_limits, "BODY_S", 0.3)
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.3)
    with httpx.stream(
        "POST", f"{here.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines


def test_a_body_has_a_time_limit(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "BODY_S", 0.3)
    with opened(here, HALF_BODY) as slow:
        told = answer_of(slow)
    assert told.startswith(b"HTTP/1.1 408")
    assert json.loads(told.split(b"\r\n\r\n", 1)[1])["type"] == "error", "in Anthropic's words"
    until(lambda: here.service.gate.n_inside == 0)


def test_a_short_answer_is_one_packet(here: Running) -> None:
    with opened(here, WHOLE) as client:
        for _ in range(5):
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(body) in head and body
            client.sendall(WHOLE)


def test_the_limit_leaves_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connection_limits.connection_limit() < soft
    for limit, most in ((2048, 1536), (256, 192), (10**6, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=limit: (n, n))
        assert connection_limits.connection_limit() == most


def until(is_so: object) -> None:
    """Wait for up to two minutes."""
    assert callable(is_so)
    wait_until(is_so, "it never came true")
