"""The way to a member and back: slow readers, endless streams, a member that loads again."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from msgspec import Struct

from mlxstack.api import connection_limits
from mlxstack.core.preset import ServerSpec
from mlxstack.gateway.upstream import MAX_HELD_BYTES, MemberConnection, Upstream
from tests.gateway.gateway_thread import Front, in_front
from tests.gateway.real_members import until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

PIECE = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
N_STALLED = 4
MAX_HELD = 16 * 2**20
"""Bytes for one client: of the buffers of four sockets, and of the gateway."""

STREAM = "/v1/chat/completions"


class Fountain(Struct):
    """A member at `url` whose streams never end: bytes that each took, streams that were left."""

    url: str = ""
    n_sent: dict[int, int] = {}
    n_left: int = 0
    is_loading: bool = False
    n_connections: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if head.startswith(b"POST " + STREAM.encode()):
                    await self.pour(writer)
                head = HEAD.replace(b"200 OK", b"503 Loading") if self.is_loading else HEAD
                body = json.dumps({"status": "loading" if self.is_loading else "ok"}).encode()
                writer.write(
                    head % b"application/json" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def pour(self, writer: asyncio.StreamWriter) -> None:
        me = len(self.n_sent)
        self.n_sent[me] = 0
        writer.write(HEAD % b"text/event-stream")
        try:
            while True:
                writer.write(PIECE)
                await writer.drain()
                self.n_sent[me] += len(PIECE)
        finally:
            self.n_left += 1


@pytest.fixture(scope="module")
def fountain() -> Iterator[Fountain]:
    source = Fountain(n_sent={})
    started = threading.Event()
    loops = []

    async def main() -> None:
        server = await asyncio.start_server(source.answer, "127.0.0.1", 0)
        source.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append((asyncio.get_running_loop(), asyncio.Event()))
        started.set()
        await loops[0][1].wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield source
    loops[0][0].call_soon_threadsafe(loops[0][1].set)
    thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def front(fountain: Fountain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    with in_front(ServerSpec(port=0, drain_s=1), fountain.url, "fountain", folder) as live:
        yield live


def silent(front: Front) -> socket.socket:
    """A client that asks for a stream and reads nothing."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    listener.connect(("127.0.0.1", httpx.URL(front.url).port or 0))
    head = f"POST {STREAM} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
    listener.sendall(head.encode() + b"{}")
    return listener


def test_little_is_held_for_those_that_do_not_read_and_others_go_on(
    front: Front, fountain: Fountain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNREAD_BYTES", 2**20)
    first = len(fountain.n_sent)
    stalled = [silent(front) for _ in range(N_STALLED)]
    until(lambda: len(fountain.n_sent) == first + N_STALLED, "no stream began")
    with httpx.Client(base_url=front.url, timeout=PATIENCE_S) as http:
        for _ in range(20):
            assert http.post("/tokenize", json={}).json() == {"status": "ok"}
        with http.stream("POST", STREAM, json={}) as answer:
            n_read = 0
            for piece in answer.iter_raw():
                n_read += len(piece)
                if n_read > 2 * MAX_HELD:
                    break
    assert n_read > 2 * MAX_HELD
    n_held = [fountain.n_sent[first + i] for i in range(N_STALLED)]
    assert all(0 < n < MAX_HELD for n in n_held), "more was taken for them"
    until(lambda: front.member.n_active == N_STALLED, "the others are not inside")
    for client in stalled:
        client.close()
    until(lambda: front.member.n_active == 0, "their streams go on")
    until(lambda: fountain.n_left == N_STALLED + 1, "the member was not told")


def test_one_that_takes_nothing_for_long_is_left(
    front: Front, fountain: Fountain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "STALLED_S", 0.2)
    n_left = fountain.n_left
    with silent(front):
        until(lambda: fountain.n_left == n_left + 1, "the member works on for it")
        until(lambda: front.member.n_active == 0, "it holds the model in memory")


def test_a_member_that_loads_again_by_itself_keeps_requests_waiting(
    front: Front, fountain: Fountain
) -> None:
    fountain.is_loading = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{front.url}/tokenize", json={}, timeout=PATIENCE_S)
        until(lambda: front.member.n_waiting == 1, "it did not wait")
        read = httpx.get(f"{front.url}/props", timeout=PATIENCE_S)
        fountain.is_loading = False
        assert asked.result().json() == {"status": "ok"}
    assert read.status_code == 503 and "fountain" in read.text


def test_connections_to_the_member_are_kept(front: Front, fountain: Fountain) -> None:
    with httpx.Client(base_url=front.url, timeout=PATIENCE_S) as http:
        http.post("/tokenize", json={}).raise_for_status()
        before = fountain.n_connections
        for _ in range(20):
            # A response can arrive before the connection of its request is free.
            until(lambda: not front.member.n_active, "the request before is not over")
            http.post("/tokenize", json={}).raise_for_status()
    assert fountain.n_connections == before


async def test_a_request_that_outlives_its_upstream_leaves_no_connection() -> None:
    is_asked = asyncio.Event()
    may_answer = asyncio.Event()
    is_left = asyncio.Event()

    async def member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        is_asked.set()
        await may_answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        if not await reader.read():
            is_left.set()
        writer.close()

    async def silent_client() -> Any:
        return await asyncio.Event().wait()

    async def to_client(message: Any) -> None:
        received.append(message.get("body", b""))

    received: list[bytes] = []
    server = await asyncio.start_server(member, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}")
    scope = {"method": "GET", "raw_path": b"/health", "query_string": b"", "headers": []}
    forwarded = asyncio.create_task(upstream.forward(scope, b"", "", silent_client, to_client))
    async with asyncio.timeout(PATIENCE_S):
        await is_asked.wait()
        upstream.close()
        may_answer.set()
        assert await forwarded and b"".join(received) == b"ok"
        await is_left.wait()
    server.close()


async def test_a_connection_is_read_again_after_an_answer_that_filled_its_buffer() -> None:
    """It is kept for the next request, whose answer would not be read."""
    body = b"x" * (2 * MAX_HELD_BYTES)
    near, far = socket.socketpair()
    with far:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(MemberConnection, sock=near)
        # All of it comes before the client takes anything.
        connection.data_received(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        assert not connection.transport.is_reading()
        taken: list[bytes] = []

        async def send(message: Any) -> None:
            taken.append(message.get("body", b""))

        assert await connection.relay(send, has_body=True)
        assert b"".join(taken) == body
        assert connection.transport.is_reading()
        connection.transport.close()
