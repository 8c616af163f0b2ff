"""Messages between rank 0 and the other ranks, and their socket.

Rank 0 sends a record before every forward pass: the operations on KV since the last one, and the
tokens of the pass. The other ranks take no fact from local state.
"""

import socket
import struct
from contextlib import suppress
from threading import Lock
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import CollectGarbage
from mlxstack.core.model_info import Identity
from mlxstack.core.preset import Preset
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.kv.slot_context import KVSources

Tokens = tuple[int, ...]
Keys = tuple[str, ...]

LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 30
"""Bytes of a message at most."""


class NewContext(Struct, frozen=True, array_like=True, tag="n"):
    """Make an empty context with the kinds of caches for `n_tokens`."""

    context: int
    n_tokens: int = 0


class ChangeContext(Struct, frozen=True, array_like=True, tag="c"):
    """Call a method of a context, with `other` if given."""

    context: int
    method: str
    args: tuple[int, ...] = ()
    other: int | None = None


class Load(Struct, frozen=True, array_like=True, tag="l"):
    """Fill a context with parked KV, or with what was read from disk for it."""

    context: int
    tokens: Tokens
    sources: KVSources


class Pack(Struct, frozen=True, array_like=True, tag="p"):
    """Park a segment of a context under a key."""

    key: str
    context: int
    start: int
    end: int


class Mark(Struct, frozen=True, array_like=True, tag="m"):
    """Park the checkpoint of a context at a position under a key."""

    key: str
    context: int
    position: int


class Adopt(Struct, frozen=True, array_like=True, tag="a"):
    """Park what was read from disk for a key."""

    key: str


class Discard(Struct, frozen=True, array_like=True, tag="u"):
    """Discard what was read from disk for a key."""

    key: str


class Drop(Struct, frozen=True, array_like=True, tag="d"):
    """Forget the parked KV of a key."""

    key: str


class Pass(Struct, frozen=True, array_like=True, tag="x"):
    """Run a forward pass on pairs of context and tokens.

    `digest` is that of the contexts before.
    """

    digest: int
    slots: tuple[tuple[int, Tokens], ...]


class MeasureWidths(Struct, frozen=True, array_like=True, tag="w"):
    """Run the passes that measure seconds by width, as rank 0 does."""


Operation = (
    NewContext | ChangeContext | Load | Pack | Mark | Adopt | Discard | Drop | Pass | MeasureWidths
)  # fmt: skip


class Record(Struct, frozen=True, array_like=True, tag="record"):
    """Operations in order; `step` counts the records of a session."""

    step: int
    operations: tuple[Operation, ...]


class WriteKV(Struct, frozen=True, array_like=True, tag="write"):
    """Write the parked KV of a key to disk.

    `meta` is that of the file of rank 0.
    """

    key: str
    meta: str


class ReadKV(Struct, frozen=True, array_like=True, tag="read"):
    """Read the KV of a key from disk, for one `Adopt`, `Load` or `Discard`."""

    key: str


class FlushKV(Struct, frozen=True, array_like=True, tag="flush"):
    """Make all written files durable."""


class SweepKV(Struct, frozen=True, array_like=True, tag="sweep"):
    """Collect garbage on the own disk."""

    command: CollectGarbage


Job = WriteKV | ReadKV | FlushKV | SweepKV


class Task(Struct, frozen=True, array_like=True, tag="task"):
    """A job for the disk of a rank, answered by `TaskOutcome`."""

    id: int
    job: Job


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a rank; `port` is where its ring listens."""

    key: str
    version: str
    port: int


class Session(Struct, frozen=True, array_like=True, tag="session"):
    """Load the model of a preset on a ring of `hosts`."""

    preset: Preset
    rank: int
    hosts: tuple[str, ...]


class Loaded(Struct, frozen=True, array_like=True, tag="loaded"):
    """The weights are loaded; no pass has run yet."""

    identity: Identity


class RankMemory(Struct, frozen=True):
    """Bytes for KV and for all arrays (see `MemoryPlan`), and per token."""

    kv_budget: int
    array_limit: int
    bytes_per_token: int


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The model is checked; `keys` are those of KV files on disk."""

    check: BatchingCheck
    memory: RankMemory
    keys: Keys


class TaskOutcome(Struct, frozen=True, array_like=True, tag="outcome"):
    """Result of a task; `error` is empty when it succeeded."""

    id: int
    error: str = ""


class Beat(Struct, frozen=True, array_like=True, tag="beat"):
    """Heartbeat."""


class RankFailure(Struct, frozen=True, array_like=True, tag="failure"):
    """The rank cannot go on; with `is_setup` a restart would not help."""

    reason: str
    is_setup: bool = False


class EndOfSession(Struct, frozen=True, array_like=True, tag="end"):
    """Unload the model, and wait for the next session."""


Message = (
    Record | Task | Session | EndOfSession | Hello | Loaded | Ready | TaskOutcome | Beat
    | RankFailure
)  # fmt: skip


def comparable(check: BatchingCheck) -> BatchingCheck:
    """The check with every kind of cache once.

    Each stage of a pipeline has layers of its own.
    """
    kinds = sorted(set(check.kv.split(";")))
    return replace(check, kv=";".join(kinds))


class Channel:
    """Messages over one TCP connection. `send` is thread-safe; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self.n_sent = 0
        """Bytes sent so far."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> int:
        """Send a message; its bytes. Raises OSError."""
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(LENGTH.pack(len(data)) + data)
            self.n_sent += LENGTH.size + len(data)
        return LENGTH.size + len(data)

    def receive(self, longest: int = MAX_BYTES) -> Any:
        """Next message, or None at the end. Raises OSError, MsgspecError."""
        head = self._read(LENGTH.size)
        n_bytes = LENGTH.unpack(head)[0] if head else 0
        if n_bytes > longest:
            raise OSError(f"a message of {n_bytes} bytes came, at most {longest} are allowed")
        data = self._read(n_bytes)
        return self._decoder.decode(data) if data else None

    def close(self) -> None:
        """Close the connection, also while a thread receives."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, n_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            part = self._socket.recv(min(n_bytes - len(data), 1 << 20))
            if not part:
                return b""
            data += part
        return bytes(data)
