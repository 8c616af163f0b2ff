"""Rank group: starts the other ranks, sends records, detects lost ranks."""

import hmac
import itertools
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from subprocess import Popen, TimeoutExpired
from threading import Event, Lock, Thread
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import mlx.core as mx
import msgspec
from msgspec.structs import replace

from mlxstack import __version__
from mlxstack.core.errors import Broken, SetupError, StackError
from mlxstack.core.model_info import Identity
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.device_memory import MemoryPlan
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.ranks import hosts as ranks
from mlxstack.features.ranks import wire
from mlxstack.features.ranks.passes import digest_of, run_pass
from mlxstack.features.ranks.sharding import join_ring
from mlxstack.features.ranks.wire import Channel, Loaded, Ready, TaskOutcome
from mlxstack.host.macos import LOCAL_NETWORK, local_network_hint
from mlxstack.host.process import free_port

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", Loaded, Ready)

HELLO_S = 2.0
MAX_HELLO = 1024
"""Seconds and bytes in which a connection has to say which rank it is."""
CONNECT_S = 60.0
"""Seconds for the other ranks to start and connect."""
LOAD_S = 3600.0
"""Seconds for the other ranks to load the model, and to download it before."""
END_S = 5.0
"""Seconds in which a rank ends once its connection is closed."""
REASON_S = 1.0
"""Seconds to wait for the reason of a broken forward pass."""
BEAT_S = 1.0
MAX_MISSED = 4
"""Signs of life in a row, one each `BEAT_S`, without which a rank counts as lost."""


class RankGroup:
    """Ranks of one service, for one engine after another.

    Rank 0 runs in this process. Operations are logged and sent by the MLX thread; tasks for the
    disk come from any thread.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.lost = ""
        """Why the group cannot go on; empty while it can."""
        self.on_lost: Callable[[StackError], None] = lambda _: None
        self.keys: frozenset[str] = frozenset()
        """KV files that all other ranks have on disk."""
        self.n_records = 0
        self._channels: list[Channel] = []
        self._processes: list[Popen[bytes]] = []
        self._ring: tuple[str, ...] = ()
        self._world: Any = None
        self._loaded: SimpleQueue[tuple[int, Loaded]] = SimpleQueue()
        self._ready: SimpleQueue[tuple[int, Ready]] = SimpleQueue()
        self._n_messages: list[int] = []
        self._tasks: dict[int, tuple[set[int], Future[None]]] = {}
        self._task_ids = itertools.count()
        self._lock = Lock()
        self._is_in_session = Event()
        self._is_lost = Event()
        self._log: list[wire.Operation] = []
        self._depth = 0
        self._context_ids = itertools.count()
        self._contexts: WeakValueDictionary[int, SlotContext] = WeakValueDictionary()

    @property
    def size(self) -> int:
        """Number of ranks, this one included."""
        return len(self.hosts)

    @property
    def n_bytes(self) -> int:
        """Bytes of records and tasks sent to all ranks so far."""
        return sum(channel.n_sent for channel in self._channels)

    def open(self, preset: Preset) -> Any:
        """Begin a session; the MLX group. Raises SetupError or Broken."""
        self._require()
        if self._is_in_session.is_set():
            raise SetupError("another engine of this process uses the other ranks")
        if not self._channels:
            self._connect()
        self._log = []
        self.n_records = 0
        for rank, channel in enumerate(self._channels, 1):
            # The keys of the API are not for them.
            channel.send(wire.Session(replace(preset, server=ServerSpec()), rank, self._ring))
        if self._world is None:
            self._world = join_ring(0, self._ring)
        return self._world

    def compare(self, own: Identity) -> None:
        """Compare the loaded models. Raises SetupError.

        It precedes the first pass: ranks of different models would wait for each other in it.
        """
        for _ in self._channels:
            rank, loaded = self._next(self._loaded)
            if difference := _difference(own, loaded.identity):
                raise SetupError(
                    f"{self._name(rank)} has {difference} than rank 0; `mlx-stack doctor --hosts "
                    f"{','.join(self.hosts)}` compares the machines"
                )

    def agree(
        self,
        own: BatchingCheck,
        plan: MemoryPlan,
        bytes_per_token: int,
        *,
        is_measured: bool = False,
    ) -> MemoryPlan:
        """Compare the checked models; the least memory of all ranks. Raises SetupError.

        With `is_measured` the passes of `measure_widths` are next here, and run on all ranks.
        """
        keys: list[wire.Keys] = []
        for _ in self._channels:
            rank, ready = self._next(self._ready)
            if wire.comparable(own) != ready.check:
                raise SetupError(f"{self._name(rank)} has another result of the self-check at load")
            keys.append(ready.keys)
            plan = least_memory(plan, bytes_per_token, ready.memory)
        self.keys = frozenset.intersection(*map(frozenset, keys)) if keys else frozenset()
        self._is_in_session.set()
        if is_measured:
            self.log(wire.MeasureWidths())
            self.flush()
        return plan

    def end(self) -> None:
        """End the session; the ranks unload the model."""
        self._is_in_session.clear()
        self._contexts.clear()
        with suppress(OSError):
            for channel in self._channels:
                channel.send(wire.EndOfSession())

    def close(self) -> None:
        """End the other ranks, which end with their connections."""
        with self._lock:
            self.lost = self.lost or "the group was closed"
        self._fail_tasks(Broken(self.lost))
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except TimeoutExpired:
                process.kill()
                process.wait()

    def register(self, context: SlotContext) -> int:
        """Number by which records name a context."""
        number = next(self._context_ids)
        self._contexts[number] = context
        return number

    def context_of(self, caches: Sequence[Any]) -> tuple[int, SlotContext]:
        """The context that has these caches, and its number."""
        return next((n, c) for n, c in self._contexts.items() if c.caches is caches)

    def log(self, operation: wire.Operation) -> None:
        """Log an operation, unless it is a part of another one."""
        if self._depth == 0 and not self.lost:
            with self._lock:
                self._log.append(operation)

    def repeat(self, operation: wire.Operation, work: Callable[[], T]) -> T:
        """Run `work` here and on the other ranks. An error ends the group."""
        self.log(operation)
        self._depth += 1
        try:
            return work()
        except Exception as error:
            self._lose(f"rank 0 failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._depth -= 1

    def run_pass(
        self, runner: ModelRunner, caches: Sequence[Sequence[Any]], tokens: Sequence[wire.Tokens]
    ) -> mx.array:
        """Run a forward pass on all ranks. Raises Broken."""
        numbered = [self.context_of(part) for part in caches]
        contexts = [context for _, context in numbered]
        slots = tuple((number, part) for (number, _), part in zip(numbered, tokens, strict=True))
        self._require()
        self.log(wire.Pass(digest_of(contexts), slots))
        self.flush()
        try:
            return run_pass(runner, contexts, tokens)
        except Exception as error:
            # A rank that ended breaks the ring first; why it ended comes over its connection.
            self._is_lost.wait(REASON_S)
            self._lose(f"a forward pass failed: {error}")
            raise Broken(self.lost) from error

    def flush(self) -> None:
        """Send the operations since the last record."""
        with self._lock:
            if not self._log or self.lost:
                return
            operations = tuple(self._log)
            self._log = []
            self.n_records += 1
            self._send(wire.Record(self.n_records, operations))

    def ask(self, job: wire.Job) -> Future[None]:
        """Run a job for the disk on all other ranks."""
        self._require()
        self.flush()
        future: Future[None] = Future()
        with self._lock:
            number = next(self._task_ids)
            self._tasks[number] = set(range(1, self.size)), future
            self._send(wire.Task(number, job))
        if self.lost:
            _fail(future, Broken(self.lost))
        return future

    def _send(self, message: wire.Message) -> None:
        try:
            for channel in self._channels:
                channel.send(message)
        except OSError as error:
            reason = f"a rank was lost: {error}{local_network_hint(error)}"
            Thread(target=self._lose, args=(reason,), daemon=True).start()

    def _require(self) -> None:
        if self.lost:
            raise Broken(self.lost)

    def _connect(self) -> None:
        """Start the other ranks, and wait until they have connected. Raises SetupError."""
        host = socket.gethostbyname(self.hosts[0])
        keys = [secrets.token_hex(16) for _ in self.hosts[1:]]
        channels: dict[int, tuple[Channel, int]] = {}
        with socket.create_server((host, 0)) as listener:
            address = f"{host}:{listener.getsockname()[1]}"
            for host_name, key in zip(self.hosts[1:], keys, strict=True):
                self._processes.append(ranks.start(host_name, address, key))
            until = time.monotonic() + CONNECT_S
            listener.settimeout(HELLO_S)
            while len(channels) < len(keys):
                try:
                    connection = listener.accept()[0]
                    connection.settimeout(HELLO_S)
                    channel = Channel(connection)
                    hello = channel.receive(MAX_HELLO)
                except (OSError, msgspec.MsgspecError) as error:
                    missing = [i for i in range(len(keys)) if i not in channels]
                    ended = [i for i in missing if self._processes[i].poll() is not None]
                    if not ended and time.monotonic() < until:
                        continue
                    raise SetupError(self._why_missing(ended or missing, address)) from error
                rank = rank_of(hello, keys)
                if rank is None:
                    channel.close()
                elif hello.version != __version__:
                    raise SetupError(
                        f"{self._name(rank + 1)} runs mlx-stack {hello.version}, rank 0 "
                        f"{__version__}; install the same version on both"
                    )
                else:
                    connection.settimeout(None)
                    channels[rank] = channel, hello.port
        connected = [channels[i] for i in range(len(keys))]
        addresses = [
            f"{socket.gethostbyname(h)}:{port}"
            for h, (_, port) in zip(self.hosts[1:], connected, strict=True)
        ]
        self._ring = (f"{host}:{free_port(host)}", *addresses)
        self._channels = [channel for channel, _ in connected]
        self._n_messages = [0] * len(connected)
        for rank, channel in enumerate(self._channels, 1):
            Thread(target=self._receive, args=(rank, channel), daemon=True).start()
        Thread(target=self._watch, daemon=True).start()

    def _why_missing(self, missing: Sequence[int], address: str) -> str:
        """Why other ranks, counted from 0, have not connected."""
        host = self.hosts[missing[0] + 1]
        status = self._processes[missing[0]].poll()
        names = ", ".join(self.hosts[i + 1] for i in missing)
        ending = f"; its command ended with status {status}"
        if status is None:
            ending = f" within {CONNECT_S:g} s"
        # The command tells its status only, and the other Mac may be the one that refuses.
        privacy = f"; on both Macs, {LOCAL_NETWORK}" if sys.platform == "darwin" else ""
        return (
            f"no rank has connected from {names}{ending}; see the log, and try "
            f"`{ranks.command_text(host, address)}` by hand{privacy}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.size} ({self.hosts[rank]})"

    def _next(self, messages: "SimpleQueue[tuple[int, M]]") -> tuple[int, M]:
        """Message of a rank that loads. Raises Broken, SetupError."""
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            self._require()
            with suppress(Empty):
                return messages.get(timeout=0.1)
        raise SetupError(f"not all ranks have loaded the model within {LOAD_S:g} s")

    def _receive(self, rank: int, channel: Channel) -> None:
        """Handle the messages of one rank (thread), until it ends."""
        reason = "it has ended, or its machine has"
        try:
            while (message := channel.receive()) is not None:
                self._n_messages[rank - 1] += 1
                if isinstance(message, Loaded):
                    self._loaded.put((rank, message))
                elif isinstance(message, Ready):
                    self._ready.put((rank, message))
                elif isinstance(message, TaskOutcome):
                    self._settle(rank, message)
                elif isinstance(message, wire.RankFailure):
                    self._lose(f"{self._name(rank)}: {message.reason}", message.is_setup)
                    return
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"{error}{local_network_hint(error)}"
        self._lose(f"{self._name(rank)} was lost: {reason}")

    def _watch(self) -> None:
        """Detect silent ranks (thread): a lost machine closes no connection."""
        n_missed = [0] * len(self._channels)
        n_before = list(self._n_messages)
        while not self.lost:
            # Beats are counted instead of seconds: while this machine is suspended, none can come.
            time.sleep(BEAT_S)
            for index, n_messages in enumerate(self._n_messages):
                is_silent = self._is_in_session.is_set() and n_messages == n_before[index]
                n_missed[index] = n_missed[index] + 1 if is_silent else 0
                n_before[index] = n_messages
                if n_missed[index] >= MAX_MISSED:
                    self._lose(
                        f"{self._name(index + 1)} was lost: {MAX_MISSED} signs of life missed"
                    )

    def _settle(self, rank: int, outcome: TaskOutcome) -> None:
        with self._lock:
            left, future = self._tasks.get(outcome.id, (set(), None))
            left.discard(rank)
            if not left:
                self._tasks.pop(outcome.id, None)
        if future is None:
            return
        if outcome.error:
            _fail(future, StackError(f"{self._name(rank)}: {outcome.error}"))
        elif not left:
            with suppress(InvalidStateError):
                future.set_result(None)

    def _lose(self, reason: str, is_setup: bool = False) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = (
                reason if is_setup else f"{reason}; all ranks restart, try again in a moment"
            )
            self._is_lost.set()
        log.error("%s", self.lost)
        error = SetupError(self.lost) if is_setup else Broken(self.lost)
        self._fail_tasks(error)
        for channel in self._channels:
            channel.close()
        self.on_lost(error)

    def _fail_tasks(self, error: StackError) -> None:
        """Fail those that no rank will answer; later ones fail in `ask`."""
        with self._lock:
            open_tasks = [future for _, future in self._tasks.values()]
        for future in open_tasks:
            _fail(future, error)


def _fail(future: Future[None], error: StackError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)


def rank_of(hello: object, keys: Sequence[str]) -> int | None:
    """Index of the key that a rank was started with."""
    sent_key = hello.key if isinstance(hello, wire.Hello) else ""
    matches = (i for i, key in enumerate(keys) if hmac.compare_digest(key, sent_key))
    return next(matches, None)


def least_memory(
    plan: MemoryPlan, bytes_per_token: int, rank_memory: wire.RankMemory
) -> MemoryPlan:
    """The plan of rank 0 within the memory of another rank.

    Rank 0 counts its own bytes; a stage of a pipeline may take more of them for the same tokens.
    """
    budget = rank_memory.kv_budget
    if rank_memory.bytes_per_token > bytes_per_token:
        budget = budget * bytes_per_token // rank_memory.bytes_per_token
    return replace(
        plan,
        kv_budget=min(plan.kv_budget, budget),
        array_limit=min(plan.array_limit, rank_memory.array_limit),
    )


def _difference(own: Identity, theirs: Identity) -> str:
    """The first difference between the models of two ranks, in words."""
    for field, difference in (
        ("weights", "other model files"),
        ("code", "other model code"),
        ("mlx_lm", "another version of mlx-lm"),
        ("kv_format", "another format of KV files"),
    ):
        if getattr(own, field) != getattr(theirs, field):
            return difference
    return "" if own == theirs else "another model"
