"""HTTP client of timed streams: blocking connections, a thread each."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from msgspec import Struct

from mlxstack.client import Unreachable

TIMEOUT_S = 900.0
MOST_STREAMS = 256
MOST_BYTES = 1 << 16


class ReceivedStream(Struct, frozen=True):
    """Response whose pieces have their arrival, in seconds."""

    status: int
    headers: Mapping[str, str]
    started: float
    pieces: tuple[tuple[float, bytes], ...]
    ended: float

    @property
    def body(self) -> bytes:
        """All pieces."""
        return b"".join(data for _, data in self.pieces)


class StreamClient:
    """Streams from one server, over connections that are kept.

    A blocking read takes a third of the CPU time per piece of an event loop's client, time that
    the server under test needs on a machine of few cores.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = urlsplit(url)
        self._headers = {"Content-Type": "application/json", **headers}
        self._idle: list[HTTPConnection] = []
        self._pool = ThreadPoolExecutor(MOST_STREAMS, "stream")

    def close(self) -> None:
        """Close idle connections; streams that run end with theirs."""
        while self._idle:
            self._idle.pop().close()
        self._pool.shutdown(wait=False)

    async def post(
        self, path: str, content: bytes, is_enough: Callable[[], bool]
    ) -> ReceivedStream:
        """Send a body and read the response until `is_enough`.

        Raises Unreachable when nothing answers, or the connection breaks.
        """
        connection = self._idle.pop() if self._idle else self._connection()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._pool, self._exchange, connection, path, content, is_enough
            )
        except asyncio.CancelledError:
            connection.close()
            raise
        except (OSError, HTTPException) as error:
            connection.close()
            raise Unreachable(f"no answer from {self._url.geturl()}{path} ({error})") from error

    def _exchange(
        self,
        connection: HTTPConnection,
        path: str,
        content: bytes,
        is_enough: Callable[[], bool],
    ) -> ReceivedStream:
        is_kept = connection.sock is not None
        started = time.perf_counter()
        try:
            response = self._send(connection, path, content)
        except ConnectionError:
            if not is_kept:
                raise
            # The server has closed it while it was idle.
            connection.close()
            response = self._send(connection, path, content)
        pieces: list[tuple[float, bytes]] = []
        while data := response.read1(MOST_BYTES):
            pieces.append((time.perf_counter(), data))
            if is_enough():
                break
        ended = time.perf_counter()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.isclosed():
            self._idle.append(connection)
        else:
            connection.close()
        return ReceivedStream(response.status, headers, started, tuple(pieces), ended)

    def _send(self, connection: HTTPConnection, path: str, content: bytes) -> HTTPResponse:
        with suppress(BrokenPipeError):
            # A server that refuses a body early still answers.
            connection.request("POST", self._url.path + path, content, self._headers)
        return connection.getresponse()

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        assert self._url.hostname is not None
        return kind(self._url.hostname, self._url.port, timeout=TIMEOUT_S)
