"""Follower: a rank that repeats the operations of rank 0.

`python -P -m mlxstack.features.ranks.follower HOST:PORT` connects to rank 0 there, and reads
the key of the group from the first line of its standard input.
"""

import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import Any

from mlxstack import __version__
from mlxstack.core.errors import Broken, SetupError, describe_error
from mlxstack.core.interfaces import KVFile
from mlxstack.core.prompt_tokens import KeptTokens
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.device_memory import DeviceMemory, memory_plan
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, kv_bytes_per_token
from mlxstack.features.ranks import wire
from mlxstack.features.ranks.disk import RankDisk
from mlxstack.features.ranks.passes import digest_of, run_pass
from mlxstack.features.ranks.sharding import divide, join_ring
from mlxstack.features.ranks.wire import Channel
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home, home_from
from mlxstack.host.log_lines import log_as_json
from mlxstack.host.macos import local_network_hint
from mlxstack.host.process import free_port

log = logging.getLogger("mlxstack.rank")

BEAT_S = 1.0
CHANGES = frozenset({
    "clear", "detach", "reserve", "checkpoint", "rewind", "begin_proposal", "end_proposal",
    "fork_from", "take_over",
})  # fmt: skip


class Replica:
    """Contexts and parked KV of one session. Belongs to the main thread."""

    def __init__(self, runner: ModelRunner, cache_factory: CacheFactory, disk: RankDisk) -> None:
        self._runner = runner
        self._cache_factory = cache_factory
        self._disk = disk
        self._contexts: dict[int, SlotContext] = {}
        self._parked: dict[str, Segment | StateCheckpoint] = {}
        self.step = 0

    def apply(self, record: wire.Record) -> None:
        """Carry out a record. Raises Broken when the ranks have diverged."""
        self.step += 1
        if record.step != self.step:
            raise Broken(f"record {record.step} came instead of {self.step}")
        for operation in record.operations:
            self._apply(operation)

    def file_of(self, job: wire.WriteKV, identity: str) -> KVFile:
        """The file of parked KV; its layout is that of this shard."""
        part = self._parked[job.key]
        about = segments.meta_of(job.meta)
        return segments.file_with(about, job.key, part, identity)

    def _apply(self, operation: wire.Operation) -> None:
        match operation:
            case wire.Pass(digest, slots):
                self._pass(digest, slots)
            case wire.NewContext(number, n_tokens):
                self._contexts[number] = SlotContext(self._cache_factory).new_empty(n_tokens)
            case wire.ChangeContext(number, method, args, other) if method in CHANGES:
                values = args if other is None else (self._contexts[other], *args)
                getattr(self._contexts[number], method)(*values)
                if other is not None and method == "take_over":
                    del self._contexts[other]
            case wire.Load():
                self._load(operation)
            case wire.MeasureWidths():
                measure_widths(self._runner, self._cache_factory)
            case _:
                self._park(operation)

    def _park(self, operation: wire.Operation) -> None:
        """Carry out an operation on parked KV, or on what was read from disk."""
        match operation:
            case wire.Pack(key, number, start, end):
                self._parked[key] = segments.pack(self._contexts[number], start, end)
            case wire.Mark(key, number, position):
                checkpoints = self._contexts[number].checkpoints
                self._parked[key] = next(m for m in checkpoints if m.position == position)
            case wire.Adopt(key):
                self._parked[key] = self._read_part(key)
            case wire.Discard(key):
                self._disk.take(key)
            case wire.Drop(key):
                del self._parked[key]
            case _:
                raise Broken(f"unknown operation {operation}")

    def _pass(self, digest: int, slots: tuple[tuple[int, wire.Tokens], ...]) -> None:
        contexts = [self._contexts[number] for number, _ in slots]
        if digest_of(contexts) != digest:
            lengths = ", ".join(str(len(context)) for context in contexts)
            raise Broken(f"diverged from rank 0 at record {self.step}, with {lengths} tokens")
        run_pass(self._runner, contexts, [tokens for _, tokens in slots])
        for context, (_, tokens) in zip(contexts, slots, strict=True):
            if not context.is_in_proposal:
                context.extend(tokens)

    def _load(self, load: wire.Load) -> None:
        sources = load.sources
        part_of = self._read_part if sources.is_from_disk else self._parked.__getitem__
        parts = [part_of(key) for key in (*sources.segments, *sources.checkpoints)]
        segments.load(self._contexts[load.context], KeptTokens(load.tokens), parts, sources)

    def _read_part(self, key: str) -> Segment | StateCheckpoint:
        return segments.part_of(self._disk.take(key))


class Follower:
    """Serves one rank, session after session, until rank 0 is gone."""

    def __init__(self, channel: Channel, home: Home) -> None:
        self._channel = channel
        self._home = home
        self._world: Any = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()

    def run(self) -> None:
        """Obey rank 0. Returns never: the process ends with the connection."""
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True).start()
        while True:
            message = self._inbox.get()
            if isinstance(message, wire.Session):
                self._serve(message)
                device.release()

    def _serve(self, session: wire.Session) -> None:
        if self._world is None:
            self._world = join_ring(session.rank, session.hosts)
        preset = session.preset
        size = len(session.hosts)
        part = partial(divide, self._world, preset.model.id)
        loaded = loader.load(preset.model, preset.kv, divide=part)
        self._channel.send(wire.Loaded(loaded.facts.identity))
        cache_factory = CacheFactory(loaded.model, preset.kv)
        memory = this_memory(os.environ)
        device_memory = DeviceMemory(memory.total)
        device_memory.apply()
        check = self_check(loaded.model, cache_factory, loaded.facts.n_vocab)
        device.release()
        runner = ModelRunner(loaded.model, rows=check.rows)
        n_bytes = kv_bytes_per_token(runner, cache_factory)
        plan = memory_plan(preset, loaded.facts, memory, device_memory.limits())
        identity = loader.kv_identity(
            loaded.facts.identity, check.kv, preset.kv, session.rank, size
        )
        disk = RankDisk(self._home, preset, identity.key(), self._channel)
        replica = Replica(runner, cache_factory, disk)
        device_memory.wire(preset.device.wired)
        room = wire.RankMemory(plan.kv_budget, plan.array_limit, n_bytes)
        self._channel.send(wire.Ready(wire.comparable(check), room, disk.keys()))
        log.info("rank %d of %d has loaded its shard of %s", session.rank, size, preset.model.id)
        try:
            self._handle(replica, disk)
        finally:
            disk.close()
            device_memory.restore()

    def _handle(self, replica: Replica, disk: RankDisk) -> None:
        """Handle records and tasks in their order until the session ends."""
        while True:
            message = self._inbox.get()
            match message:
                case wire.Record():
                    replica.apply(message)
                case wire.Task(_, wire.WriteKV() as job):
                    disk.write(message, partial(replica.file_of, job))
                case wire.Task():
                    disk.do(message)
                case wire.EndOfSession():
                    return

    def _receive(self) -> None:
        """Receive messages (thread); the process ends with the connection."""
        try:
            while (message := self._channel.receive()) is not None:
                self._inbox.put(message)
        except Exception as error:
            log.info("the connection to rank 0 broke: %s", error)
        log.info("rank 0 has ended, and this rank with it")
        os._exit(0)

    def _beat(self) -> None:
        """Send signs of life (thread)."""
        while True:
            time.sleep(BEAT_S)
            self._channel.send(wire.Beat())


def main() -> int:
    """Connect to rank 0 and serve it; see the module."""
    log_as_json()
    host, _, port = sys.argv[1].rpartition(":")
    key = sys.stdin.readline().strip()
    try:
        connection = socket.create_connection((host, int(port)))
    except OSError as error:
        log.error("rank 0 at %s cannot be reached: %s%s", host, error, local_network_hint(error))
        return 1
    with connection:
        address = connection.getsockname()[0]
        channel = Channel(connection)
        channel.send(wire.Hello(key, __version__, free_port(address)))
        try:
            Follower(channel, home_from(os.environ)).run()
        except Exception as error:
            if not isinstance(error, SetupError):
                log.exception("this rank cannot go on")
            reason = describe_error(error, "a rank").message
            channel.send(wire.RankFailure(reason, isinstance(error, SetupError)))
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
