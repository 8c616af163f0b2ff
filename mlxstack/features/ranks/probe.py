"""Program that tells `doctor` about a machine for a rank.

`python -P -m mlxstack.features.ranks.probe HOST:PORT` connects to `doctor` there, and reads
the key that it shows from the first line of its standard input. Messages are lines of JSON.
"""

import platform
import socket
import struct
import sys
import time
from contextlib import suppress
from io import BufferedReader, BufferedRWPair
from statistics import median
from typing import TypeVar

import msgspec
from msgspec import Struct

from mlxstack import __version__
from mlxstack.core.preset import ModelSpec
from mlxstack.host.hardware import CHILD_FAULTS, ask_mlx, last_line, version_of

T = TypeVar("T")

MODULE = "mlxstack.features.ranks.probe"
DIGEST_MODULE = "mlxstack.features.ranks.files_digest"
DIGEST_S = 1800.0
"""Seconds to read all weights of a model, where their names are no digests."""
UNREACHED = 3
"""Exit code when `doctor` cannot be reached from here."""
CONNECT_S = 5.0
"""Seconds for a connection, and for each answer on the link."""
MAX_LINE = 1 << 16
LENGTH = struct.Struct("!Q")
RECEIVED = b"\x06"
N_TRIPS = 200
LONG_ENOUGH_S = 0.2
FIRST_BYTES = 1 << 20
MAX_BYTES = 1 << 26
"""Bytes of the first and of the largest transfer; each has four times as many as the last."""


class Greeting(Struct, frozen=True):
    """First message of a probe; `unix_s` is the time of its clock."""

    key: str
    versions: dict[str, str]
    unix_s: float


class ProbeRequest(Struct, frozen=True):
    """Address to listen on, "" for none, and model to digest."""

    address: str = ""
    model: ModelSpec | None = None


class LinkListener(Struct, frozen=True):
    """Port for the measurement, or why there is none."""

    port: int = 0
    problem: str = ""


class FilesDigest(Struct, frozen=True):
    """Digests of a model as in `Identity`, or why there are none."""

    weights: str = ""
    code: str = ""
    problem: str = ""


class LinkSpeed(Struct, frozen=True):
    """Speed of a TCP connection in one direction, and median round trip."""

    bytes_per_s: float
    round_trip_s: float


def versions() -> dict[str, str]:
    """Versions that should be equal on all machines; "none" if not installed."""
    packages = {name: version_of(name) or "none" for name in ("mlx", "mlx-lm")}
    return {"mlx-stack": __version__, **packages, "Python": platform.python_version()}


def send(stream: BufferedRWPair, message: Struct) -> None:
    """Send a message. Raises OSError."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def receive(stream: BufferedRWPair, kind: type[T]) -> T:
    """The next message. Raises OSError, MsgspecError."""
    return msgspec.json.decode(stream.readline(MAX_LINE), type=kind)


def measure_link(address: str, port: int) -> LinkSpeed:
    """Measure the connection to a probe that listens there. Raises OSError."""
    with socket.create_connection((address, port), CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trip_s = median(_transfer(connection, 1) for _ in range(N_TRIPS))
        n_bytes = FIRST_BYTES
        seconds = _transfer(connection, n_bytes)
        while seconds < LONG_ENOUGH_S and n_bytes < MAX_BYTES:
            n_bytes *= 4
            seconds = _transfer(connection, n_bytes)
    return LinkSpeed(n_bytes / seconds, round_trip_s)


def digest_files(model: ModelSpec) -> FilesDigest:
    """Digests of a model's files, by a child process that imports MLX."""
    try:
        return ask_mlx(["-P", "-m", DIGEST_MODULE], FilesDigest, DIGEST_S, model)
    except CHILD_FAULTS as error:
        return FilesDigest(problem=f"MLX does not start: {last_line(error)}")


def _transfer(connection: socket.socket, n_bytes: int) -> float:
    """Seconds until `n_bytes` have been received there."""
    message = LENGTH.pack(n_bytes) + bytes(n_bytes)
    began = time.perf_counter()
    connection.sendall(message)
    if connection.recv(1) != RECEIVED:
        raise ConnectionError("the connection ended")
    return time.perf_counter() - began


def _serve_link(stream: BufferedRWPair, address: str) -> None:
    """Listen on `address`, and confirm each transfer of one connection."""
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        send(stream, LinkListener(problem=f"it cannot listen on {address}: {error.strerror}"))
        return
    with listener:
        send(stream, LinkListener(listener.getsockname()[1]))
        listener.settimeout(CONNECT_S)
        # The other side tells that no connection came, or that it broke.
        with suppress(OSError):
            connection = listener.accept()[0]
            with connection, connection.makefile("rb") as data:
                connection.settimeout(CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _confirm(connection, data)


def _confirm(connection: socket.socket, data: BufferedReader) -> None:
    room = memoryview(bytearray(FIRST_BYTES))
    while len(head := data.read(LENGTH.size)) == LENGTH.size:
        left = LENGTH.unpack(head)[0]
        while left:
            n_read = data.readinto(room[: min(left, len(room))])
            if not n_read:
                return
            left -= n_read
        connection.sendall(RECEIVED)


def main() -> int:
    """Connect to `doctor` and answer it; see the module."""
    host, _, port = sys.argv[1].rpartition(":")
    key = sys.stdin.readline().strip()
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_S)
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]} cannot be reached from there: {error}\n")
        return UNREACHED
    # A `doctor` that has gone needs no answer.
    with suppress(OSError, msgspec.MsgspecError), connection, connection.makefile("rwb") as stream:
        connection.settimeout(None)
        send(stream, Greeting(key, versions(), time.time()))
        request = receive(stream, ProbeRequest)
        if request.address:
            _serve_link(stream, request.address)
        if request.model is not None:
            send(stream, digest_files(request.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
