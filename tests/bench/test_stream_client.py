"""Client of timed streams, on a real socket: kept connections, ends, refusals."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from mlxstack.bench.stream_client import StreamClient
from mlxstack.client.errors import Unreachable

N_PIECES = 3


class Pieces(BaseHTTPRequestHandler):
    """Answers each POST with pieces in chunks; `/close` ends the connection after it, too."""

    protocol_version = "HTTP/1.1"
    peers: ClassVar[set[object]] = set()

    def do_POST(self) -> None:
        self.peers.add(self.client_address)
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(404 if self.path == "/base/nowhere" else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Own", "yes")
        self.end_headers()
        for i in range(N_PIECES):
            self.wfile.write(b"7\r\npiece %d\r\n" % i)
            time.sleep(0.2 if self.path == "/base/slow" else 0)
        if self.path != "/base/cut":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.path in {"/base/close", "/base/cut"}

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def url() -> Iterator[str]:
    Pieces.peers = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Pieces) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/base"
        server.shutdown()


@pytest.fixture
async def client(url: str) -> AsyncIterator[StreamClient]:
    one = StreamClient(url, {"authorization": "Bearer k"})
    yield one
    await one.close()


async def test_pieces_come_with_their_arrival_over_one_connection(client: StreamClient) -> None:
    for _ in range(3):
        got = await client.post("/chat", b"{}", bool)
        assert (got.status, got.headers["x-own"]) == (200, "yes")
        assert got.body == b"piece 0piece 1piece 2"
        times = [got.started, *(at for at, _ in got.pieces), got.ended]
        assert times == sorted(times)
    assert len(Pieces.peers) == 1


async def test_a_connection_that_the_server_has_closed_is_opened_again(
    client: StreamClient,
) -> None:
    await client.post("/close", b"{}", bool)
    await asyncio.sleep(0.05)
    assert (await client.post("/chat", b"{}", bool)).status == 200
    assert len(Pieces.peers) == 2


async def test_streams_run_at_the_same_time_and_may_be_left(client: StreamClient) -> None:
    everything = await asyncio.gather(*(client.post("/chat", b"{}", bool) for _ in range(8)))
    assert all(got.body == b"piece 0piece 1piece 2" for got in everything)
    left = await client.post("/slow", b"{}", lambda: True)
    assert 1 <= len(left.pieces) < N_PIECES


async def test_a_response_that_breaks_off_is_an_error(client: StreamClient) -> None:
    with pytest.raises(Unreachable, match="without sending complete message body"):
        await client.post("/cut", b"{}", bool)


async def test_refusals_have_a_status_and_lost_servers_an_error(client: StreamClient) -> None:
    assert (await client.post("/nowhere", b"{}", bool)).status == 404
    gone = StreamClient("http://127.0.0.1:1", {})
    with pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:1/chat "):
        await gone.post("/chat", b"{}", bool)
    await gone.close()
