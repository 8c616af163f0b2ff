"""Disk of a rank beside rank 0: tasks run on threads, in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

from mlxstack.core.errors import Broken, describe_error
from mlxstack.core.interfaces import KVFile
from mlxstack.core.preset import Preset
from mlxstack.features.ranks import wire
from mlxstack.host.home import Home
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.background_writer import BackgroundWriter
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import CountedDisk, WriteCounter, WriteKind


class RankDisk:
    """KV store of one shard; outcomes are sent to rank 0."""

    def __init__(self, home: Home, preset: Preset, identity: str, channel: wire.Channel) -> None:
        spec = preset.prefix_cache
        folders = AgentFolders(home.root / "agents")
        counter = WriteCounter(home.writes_file)
        counter.max_bytes = spec.disk.daily_write_bytes
        store = DiskKVStore(home.kv, CountedDisk(counter, WriteKind.KV))
        self._store = QuotaKVStore(store, folders, spec.disk)
        self._is_on = spec.enabled and spec.disk.enabled
        self._identity = identity
        self._channel = channel
        self._writer = BackgroundWriter()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._lock = Lock()
        self._files: dict[str, list[KVFile]] = {}
        """Files that were read and not taken yet, one for every read; reads may overlap."""

    def keys(self) -> wire.Keys:
        """Keys of all files of this shard."""
        if self._is_on:
            return tuple(h.key for h in self._store.headers(self._identity))
        return ()

    def take(self, key: str) -> KVFile:
        """Take the file of one read of this key. Raises Broken when there is none."""
        with self._lock:
            if not self._files.get(key):
                raise Broken(f"diverged from rank 0: the KV file {key} was not read")
            file = self._files[key].pop()
            if not self._files[key]:
                del self._files[key]
        return file

    def write(self, task: wire.Task, file_of: Callable[[str], KVFile]) -> None:
        """Write the file that `file_of` makes for the identity of this shard."""
        try:
            file = file_of(self._identity)
        except KeyError:
            self._channel.send(wire.TaskOutcome(task.id, "the KV is no longer in memory"))
            return
        n_bytes = sum(memoryview(plane.data).nbytes for plane in file.tensors)

        def work() -> None:
            self._store.make_room(n_bytes, frozenset())
            self._store.write(file)

        self._submit(task, work)

    def do(self, task: wire.Task) -> None:
        """Begin any other job."""
        match task.job:
            case wire.ReadKV(key):
                self._answer(task, self._reader.submit(partial(self._read, key)))
            case wire.SweepKV(command):
                self._submit(task, lambda: self._store.sweep(command, frozenset()))
            case _:
                self._submit(task, self._store.flush)

    def close(self) -> None:
        """Finish all jobs."""
        self._writer.close()
        self._reader.shutdown(wait=True)

    def _read(self, key: str) -> None:
        file = self._store.read(self._identity, key)
        with self._lock:
            self._files.setdefault(key, []).append(file)

    def _submit(self, task: wire.Task, work: Callable[[], Any]) -> None:
        try:
            done = self._writer.submit(work)
        except Exception as error:
            done = Future()
            done.set_exception(error)
        self._answer(task, done)

    def _answer(self, task: wire.Task, done: "Future[Any]") -> None:
        def report(future: "Future[Any]") -> None:
            error = future.exception()
            if not isinstance(error, Exception):
                reason = ""
            else:
                reason = describe_error(error, "a disk").message
            self._channel.send(wire.TaskOutcome(task.id, reason))

        done.add_done_callback(report)
