"""Write queue: ordered background writes of cache records."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.errors import Busy, StackError, describe_error
from mlxstack.core.interfaces import CallSoon, KVStore
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import file_of
from mlxstack.policy.kv import prefix_index
from mlxstack.store.background_writer import BackgroundWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEFERRED_S = 5.0
"""Seconds that deferred writes wait at most while the engine is busy."""


class PendingWrite(Struct, frozen=True):
    """Write that the writer has not accepted.

    `start` submits it, by `due_at` at the latest.
    """

    start: Callable[[], Future[Any]]
    future: Future[Any]
    due_at: float


class WriteQueue:
    """Queue before the background writer. MLX thread only, through `post`.

    The writer holds a bounded number of bytes; other records wait in memory, evictable. Deferred
    writes also wait until the engine is idle, because writing takes CPU time. The writer thread
    also deletes files.
    """

    def __init__(self, prefix_cache: PrefixCache, store: KVStore, post: CallSoon) -> None:
        self._prefix_cache = prefix_cache
        self._store = store
        self._post = post
        self._writer = BackgroundWriter(eased=self._on_capacity)
        self._due: deque[PendingWrite] = deque()
        self._promised: dict[str, Future[int]] = {}
        self._told = ""
        self.n_written = 0
        """Bytes newly written so far."""

    def write(self, keys: Sequence[str], *, is_deferred: bool = False) -> list[Future[int]]:
        """Write these records, parents first; bytes newly written of each.

        Room is made before the first of them; where there is none, all futures raise DiskFull.
        """
        fresh = tuple(key for key in keys if key not in self._promised)
        if fresh:
            room = self._line_up(partial(self.make_room, fresh), is_deferred)
            for key in fresh:
                self._promised[key] = self._line_up(partial(self._start, key, room), is_deferred)
                self._promised[key].add_done_callback(partial(self._settle, key))
        promises = [self._promised[key] for key in keys]
        self._submit_due()
        return promises

    def promised(self, keys: Sequence[str]) -> list[Future[int]]:
        """Pending records among these."""
        return [self._promised[key] for key in keys if key in self._promised]

    def hold(self, keys: Sequence[str]) -> None:
        """Keep these pending records from eviction until written."""
        for key in keys:
            if key in self._promised:
                self._prefix_cache.index.set_writing(key, True)

    def after(self, job: Callable[[], T], *, is_deferred: bool = False) -> Future[T]:
        """Run `job` on the writer thread after all pending writes."""
        promise: Future[T] = self._line_up(partial(self._writer.submit, job), is_deferred)
        self._submit_due()
        return promise

    def submit_pending(self, *, is_busy: bool) -> bool:
        """Submit what waits; while the engine is busy only what is due.

        Returns whether some is left.
        """
        if is_busy:
            self._submit_due()
        else:
            self._submit(len(self._due))
        return bool(self._due)

    def catch_up(self) -> None:
        """Wait until nothing waits to be written."""
        self._writer.drain()
        while self._due:
            self._submit(len(self._due))
            self._writer.drain()

    def make_room(self, keys: Sequence[str], n_more: int = 0) -> "Future[GCResult]":
        """Make room for these records and for `n_more` bytes of another service.

        Raises Busy; the future DiskFull.
        """
        nodes = self._prefix_cache.index.nodes
        indexed = [key for key in keys if key in nodes]
        n_bytes = n_more + sum(nodes[key].record.n_bytes for key in indexed)
        in_use = self._in_use(indexed)
        return self._forgetting(self._writer.submit(lambda: self._store.make_room(n_bytes, in_use)))

    def collect(self, command: CollectGarbage) -> "Future[GCResult]":
        """Collect garbage. Raises Busy; the future raises as `KVStore.sweep`."""
        in_use = self._in_use(())
        return self._forgetting(self._writer.submit(lambda: self._store.sweep(command, in_use)))

    def close(self) -> None:
        """Take nothing more, finish what the writer holds."""
        self._writer.close()

    def _in_use(self, keys: Sequence[str]) -> frozenset[tuple[str, str]]:
        """Records being read or written, or pinned, and all their ancestors."""
        nodes = self._prefix_cache.index.nodes
        busy = [k for k, node in nodes.items() if node.refs or node.is_writing or node.pins]
        used: set[str] = set()
        for key in (*keys, *busy):
            above: str | None = key
            while above is not None and above not in used:
                used.add(above)
                above = nodes[above].record.parent
        return frozenset((self._prefix_cache.identity, key) for key in used)

    def _forgetting(self, sweeping: "Future[GCResult]") -> "Future[GCResult]":
        sweeping.add_done_callback(lambda done: self._post(lambda: self._forget(done)))
        return sweeping

    def _forget(self, done: "Future[GCResult]") -> None:
        if done.cancelled() or done.exception() is not None or done.result().is_dry:
            return
        for victim in done.result().victims:
            if victim.ref is not None and victim.ref[0] == self._prefix_cache.identity:
                self._prefix_cache.invalidate(victim.ref[1])

    def _line_up(self, start: Callable[[], Future[Any]], is_deferred: bool) -> Future[Any]:
        due_at = time.monotonic() + (MAX_DEFERRED_S if is_deferred else 0.0)
        self._due.append(PendingWrite(start, Future(), due_at))
        return self._due[-1].future

    def _submit_due(self) -> None:
        """Submit the jobs up to the last one due."""
        now = time.monotonic()
        self._submit(
            max((i + 1 for i, job in enumerate(self._due) if job.due_at <= now), default=0)
        )

    def _submit(self, n_jobs: int) -> None:
        """Submit the first jobs until the writer is full; `_on_capacity` continues."""
        for _ in range(n_jobs):
            due = self._due[0]
            try:
                copy_outcome(due.start(), due.future)
            except Busy:
                return
            except Exception as error:
                due.future.set_exception(describe_error(error, "writing to disk"))
                self._due.popleft()
                raise_device_error(error)
                continue
            self._due.popleft()

    def _on_capacity(self) -> None:
        """Writer thread: submit more."""
        if self._due:
            self._post(self._submit_due)

    def _start(self, key: str, room: "Future[Any]") -> Future[int]:
        part = self._prefix_cache.get(key)
        if part is None:
            del self._promised[key]
            raise StackError("memory ran short before the disk could take it")
        file = file_of(
            self._prefix_cache.index.nodes[key].record, part, self._prefix_cache.identity
        )

        def work() -> int:
            # One writer thread: that job is over.
            room.result()
            n_bytes = self._store.write(file)
            self.n_written += n_bytes
            return n_bytes

        n_bytes = sum(memoryview(plane.data).nbytes for plane in file.tensors)
        future = self._writer.submit(work, n_bytes)
        self._prefix_cache.index.set_writing(key, True)
        return future

    def _settle(self, key: str, done: "Future[int]") -> None:
        self._post(lambda: self._written(key, done))

    def _written(self, key: str, done: "Future[int]") -> None:
        if self._promised.get(key) is not done:
            return
        del self._promised[key]
        node = self._prefix_cache.index.nodes.get(key)
        if node is None:
            return
        self._prefix_cache.index.set_writing(key, False)
        error = done.exception()
        if error is None:
            self._prefix_cache.on_disk(node.record, time.monotonic())
            self._told = ""
        elif str(error) != self._told:
            self._told = str(error)
            end = prefix_index.end_of(node.record)
            log.warning("the KV of %d tokens was not written: %s", end, error)


def copy_outcome(source: "Future[Any]", target: "Future[Any]") -> None:
    """Copy the outcome of one future to another."""

    def settle(done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(settle)
