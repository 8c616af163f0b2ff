"""A client that is slow to read holds nothing but its own answer."""

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from mlxstack.api import connection_limits
from mlxstack.api.listener import uvicorn_config
from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body
from tests.api.running import Running, tiny_preset
from tests.gateway.gateway_thread import WAYS, running_behind
from tests.patience import PATIENCE_S, until, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

N_ANSWERS = 3
N_TOKENS = 200
LONG = {
    **chat_body(max_tokens=N_TOKENS, ignore_eos=True, n=N_ANSWERS, logprobs=True, top_logprobs=20),
    "stream": True,
}
"""Its answer is far longer than the buffers of sockets, of which a server's are small here."""
SEND_BUFFER = 2**14


@pytest.fixture(scope="module", params=WAYS)
def here(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    preset = tiny_preset(model_folder, server=ServerSpec(port=0))
    connected = connection_limits.BoundedConnection.connection_made

    def connected_narrowly(
        connection: connection_limits.BoundedConnection, transport: asyncio.Transport
    ) -> None:
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        connected(connection, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_limits.BoundedConnection, "connection_made", connected_narrowly)
        with running_behind(request.param, preset, tmp_path_factory.mktemp("slow")) as found:
            yield found


def asked(here: Running) -> socket.socket:
    """A client that has sent its request, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", httpx.URL(here.url).port or 0))
    body = json.dumps(LONG).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


def wait_until_over(here: Running, n_before: int) -> None:
    """Wait until the request is inside neither the service nor its gateway."""
    gate = here.service.gate
    wait_until(lambda: gate.n_entered > n_before and gate.n_inside == 0)
    if f":{here.service.preset.server.port}" not in here.url:
        cards = httpx.get(f"{here.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        wait_until(lambda: not any(card.get("n_active") for card in cards))


def rest_of(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_request_is_over_with_its_last_token_and_the_answer_stays_whole(
    here: Running, is_half_closed: bool
) -> None:
    n_before = here.service.gate.n_entered
    with asked(here) as client:
        if is_half_closed:
            client.shutdown(socket.SHUT_WR)
        wait_until_over(here, n_before)
        assert httpx.get(f"{here.url}/health", timeout=PATIENCE_S).json()["status"] == "ok"
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 200"), answer[-300:]
    assert answer.count(b'"top_logprobs"') >= N_ANSWERS * N_TOKENS
    assert b"data: [DONE]" in answer


def test_a_client_that_takes_nothing_is_left_with_a_word(
    here: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits, "STALLED_S", 0.2)
    with asked(here), caplog.at_level(logging.WARNING):
        wait_until(lambda: "its client took nothing of an answer" in caplog.text)


async def test_a_client_that_takes_too_long_is_left_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**25)})

    made: list[connection_limits.BoundedConnection] = []

    def connected() -> connection_limits.BoundedConnection:
        made.append(connection_limits.BoundedConnection(config, ServerState(), {}))
        return made[0]

    config = uvicorn_config(app)
    config.load()
    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: bool(made) and made[0].behind_since is not None and made[0].is_waiting)
        n_unread = made[0].n_unread
        while made[0].n_unread == n_unread:
            await reader.read(2**20)
        made[0]._look_at_client()
        assert not made[0].transport.is_closing(), "it takes something, and has time"
        n_unread = made[0].n_unread
        while made[0].n_unread == n_unread:
            await reader.read(2**20)
        monkeypatch.setattr(connection_limits, "MAX_TAKE_S", 0.0)
        made[0]._look_at_client()
        assert made[0].transport.is_closing()
        assert "did not take an answer within" in caplog.text
        writer.close()


def test_answers_that_wait_are_bounded(
    here: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNREAD_BYTES", 2**16)
    monkeypatch.setattr(connection_limits, "MAX_WAIT_S", 0.2)
    with asked(here), caplog.at_level(logging.WARNING):
        wait_until(lambda: "an answer waited 0.2 s for its client" in caplog.text)
        wait_until(lambda: here.service.gate.n_inside == 0)


def test_the_client_that_is_behind_for_longest_makes_room(
    here: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits, "UNREAD_STEP", 2**10)
    n_before = here.service.gate.n_entered
    with asked(here) as first, caplog.at_level(logging.WARNING):
        wait_until_over(here, n_before)
        monkeypatch.setattr(connection_limits, "MAX_UNREAD_IN_ALL", 2**16)
        with asked(here):
            wait_until(lambda: "are too long together" in caplog.text)
        monkeypatch.undo()
        assert not rest_of_broken(first).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def rest_of_broken(client: socket.socket) -> bytes:
    """What a client reads until its connection is ended."""
    taken = b""
    try:
        while data := client.recv(1 << 20):
            taken += data
    except ConnectionError:
        pass
    return taken
