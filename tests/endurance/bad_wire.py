"""A TCP proxy with faults of a connection, and an HTTP peer whose answers are changed."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from msgspec import Struct

CHUNK = 1 << 16
CLIENT_S = 60.0
DROPPED = {"connection", "transfer-encoding", "content-length", "host", "date", "server"}


class WireFault(Struct, frozen=True):
    """A fault at byte `offset` of all bytes to the peer (`is_up`) or from it.

    `kind` is "cut" (both sides are closed), "flip" (a bit of that byte is changed) or "stall"
    (nothing comes behind it).
    """

    kind: str
    is_up: bool
    offset: int


class Wire:
    """The proxy. Bytes are counted over all connections since `arm`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._fault: WireFault | None = None
        self._n_bytes = {True: 0, False: 0}
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.n_met = 0

    def arm(self, fault: WireFault | None = None) -> tuple[int, int]:
        """End all connections, count anew; the bytes up and down until now."""
        with self._lock:
            counted = self._n_bytes[True], self._n_bytes[False]
            self._n_bytes = {True: 0, False: 0}
            self._fault = fault
            self.n_met = 0
            ending = self._open
            self._open = set()
            self._released.set()
            self._released = threading.Event()
        for connection in ending:
            _end(connection)
        return counted

    @contextmanager
    def serving(self) -> Iterator["Wire"]:
        """Accept connections in a thread."""
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            _end(self._listener)
            thread.join()
            self.arm()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, _, port = self.target.removeprefix("http://").partition(":")
                try:
                    far = socket.create_connection((host, int(port)))
                except OSError:
                    _end(near)
                    continue
                with self._lock:
                    self._open |= {near, far}
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                data, is_ended = self._spoiled(bytearray(data), is_up)
                sink.sendall(data)
                if is_ended:
                    break
        _end(source)
        _end(sink)

    def _spoiled(self, data: bytearray, is_up: bool) -> tuple[bytearray, bool]:
        """The bytes to pass on, and whether the connection ends behind them."""
        with self._lock:
            fault = self._fault
            start = self._n_bytes[is_up]
            released = self._released
            self._n_bytes[is_up] += len(data)
            is_met = fault is not None and fault.is_up == is_up
            is_met = is_met and fault is not None and start <= fault.offset < start + len(data)
            self.n_met += is_met
        if fault is None or not is_met:
            return data, False
        if fault.kind == "flip":
            data[fault.offset - start] ^= 1 << fault.offset % 8
            return data, False
        if fault.kind == "stall":
            released.wait(CLIENT_S)
        return data[: fault.offset - start], True


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Reply(Struct):
    """An answer of the peer that may be changed; `parts` replaces `data` by a stream of bytes."""

    path: str
    status: int
    data: bytes
    headers: dict[str, str]
    parts: Iterator[bytes] | None = None
    length: int | None = None


Lie = Callable[[Reply], None]


class Liar:
    """An HTTP server that passes requests on to a peer, and changes the answers by `lie`."""

    def __init__(self, target: str, headers: dict[str, str]) -> None:
        self.lie: Lie | None = None
        liar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                request_headers = {
                    n: v for n, v in self.headers.items() if n.lower() not in DROPPED
                }
                answer = httpx.request(
                    self.command, target + self.path, content=body, timeout=CLIENT_S,
                    headers={**request_headers, **headers, "accept-encoding": "identity"},
                )  # fmt: skip
                answer_headers = {
                    n: v for n, v in answer.headers.items() if n.lower() not in DROPPED
                }
                reply = Reply(
                    f"{self.command} {self.path}",
                    answer.status_code,
                    answer.content,
                    answer_headers,
                )
                if liar.lie is not None:
                    liar.lie(reply)
                with suppress(OSError):
                    self.send(reply)

            do_GET = do_POST = do_PUT = pass_on  # noqa: N815 (names of http.server)

            def send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                length = len(reply.data) if reply.length is None else reply.length
                for name, value in {**reply.headers, "content-length": str(length)}.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in reply.parts or (reply.data,):
                    self.wfile.write(part)
                self.close_connection = reply.parts is not None or length != len(reply.data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["Liar"]:
        """Serve in a thread."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
