"""Restores a slot file: looks at what it names, makes room, reads into it, checks, takes over.

Looking happens on the reader thread, reading on several, arrays are made on the MLX thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from msgspec import Struct

from mlxstack.core.commands import SlotRestoreResult
from mlxstack.core.errors import BadRequest, Damaged, NotFound
from mlxstack.core.ports import KVFile, KVFileHeader, KVStore, Manifest, SlotFileStore
from mlxstack.engine.kv.codec import check_cover, part_of
from mlxstack.engine.kv.restore_buffers import RestoreBuffers
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint

T = TypeVar("T")

READERS = 4
"""Threads that read the files of one context."""


class RestoreSources(Struct, frozen=True):
    """Where slot files and their KV come from, and the identity they must have."""

    store: KVStore
    slot_files: SlotFileStore
    identity: str


class RestoreRequest(Struct, frozen=True):
    """Which file is to become which context, of at most `n_ctx` tokens.

    `room` makes room for so many bytes, or raises a StackError.
    """

    name: str
    context: SlotContext
    n_ctx: int
    room: Callable[[int], None]


class RestoreSource(Struct, frozen=True):
    """A slot file and what the files of its KV claim; its checkpoints are read already."""

    manifest: Manifest
    heads: tuple[KVFileHeader, ...]
    checkpoints: tuple[KVFile, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        planes = [plane for file in self.checkpoints for plane in file.tensors]
        states = sum(memoryview(plane.data).nbytes for plane in planes)
        return states + sum(head.n_bytes for head in self.heads)


class SlotRestore:
    """`post` runs a function on the MLX thread, soon; `took_over` is told what became what."""

    def __init__(
        self,
        sources: RestoreSources,
        reader: Executor,
        post: Callable[[Callable[[], None]], None],
        took_over: Callable[[SlotContext, Manifest], None],
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._post = post
        self._on_loaded = took_over
        self._queue: deque[Callable[[], None]] = deque()

    def start(self, wanted: RestoreRequest) -> "Future[SlotRestoreResult]":
        """The future raises NotFound, Damaged, BadRequest or OutOfMemory.

        Then the context is as it was. It is done on the MLX thread. One file is restored at a
        time: each makes room beside what the one before has become.
        """
        result: Future[SlotRestoreResult] = Future()
        result.add_done_callback(self._next)
        self._queue.append(partial(self._begin, wanted, result))
        if len(self._queue) == 1:
            self._queue[0]()
        return result

    def _next(self, _: "Future[SlotRestoreResult]") -> None:
        self._queue.popleft()
        if self._queue:
            self._queue[0]()

    def _begin(self, wanted: RestoreRequest, result: "Future[SlotRestoreResult]") -> None:
        started = time.perf_counter()

        def make_room(found: RestoreSource) -> None:
            n_tokens, n_ctx = len(found.manifest.tokens), wanted.n_ctx
            if n_tokens > n_ctx:
                raise BadRequest(
                    f"{wanted.name} holds {n_tokens} tokens, a slot of this service {n_ctx}",
                    "filename",
                )
            wanted.room(found.n_bytes)
            buffers = RestoreBuffers(wanted.context.new_empty(n_tokens), found.heads, n_tokens)
            reading = self._reader.submit(self._read_into, wanted.name, found, buffers)
            self._then(reading, lambda _: take_over(found, buffers), result)

        def take_over(found: RestoreSource, buffers: RestoreBuffers) -> None:
            marks = [m for b in found.checkpoints if isinstance(m := part_of(b), StateCheckpoint)]
            n_tokens, context = len(found.manifest.tokens), wanted.context
            if n_tokens:
                context.take_over(buffers.load(found.manifest.tokens, marks))
            else:
                context.clear()
            # Whoever restores it: only the tenant who saved it goes on with it.
            context.n_prompt, context.salt = n_tokens, found.manifest.salt
            self._on_loaded(context, found.manifest)
            n_bytes, took = found.manifest.n_bytes, 1000 * (time.perf_counter() - started)
            result.set_result(SlotRestoreResult(-1, wanted.name, n_tokens, n_bytes, took))

        self._then(self._reader.submit(self._inspect, wanted.name), make_room, result)

    def _then(
        self, done: "Future[T]", step: Callable[[T], None], result: "Future[SlotRestoreResult]"
    ) -> None:
        """Take the next step on the MLX thread; whatever goes wrong is the result."""

        def run(found: "Future[T]") -> None:
            try:
                step(found.result())
            except Exception as error:
                result.set_exception(error)

        # The future is handed on and not held by its own callback: nothing waits for the collector.
        done.add_done_callback(lambda found: self._post(lambda: run(found)))

    def _inspect(self, name: str) -> RestoreSource:
        store, slot_files, identity = (
            self._sources.store,
            self._sources.slot_files,
            self._sources.identity,
        )
        manifest = slot_files.read(name)
        if manifest.identity != identity:
            raise Damaged(
                f"the slot file {name} was saved with another model, adapter, KV precision or "
                "version of mlx-lm; compute the context again, or run what it was saved with"
            )
        heads = _each(name, manifest.segments, lambda key: store.head(identity, key))
        marks = _each(name, manifest.checkpoints, lambda key: store.read(identity, key))
        check_cover(name, manifest, heads)
        return RestoreSource(manifest, heads, marks)

    def _read_into(self, name: str, found: RestoreSource, buffers: RestoreBuffers) -> None:
        """Several files at once: one thread cannot fill fresh memory as fast as it is read."""
        store, identity, keys = self._sources.store, self._sources.identity, found.manifest.segments

        def pour(at: int) -> None:
            store.read_into(identity, keys[at], buffers.buffers(at))

        with _as_one(name), ThreadPoolExecutor(READERS, "pouring") as pool:
            for _ in pool.map(pour, range(len(keys))):
                pass


def _each(name: str, keys: Sequence[str], read: Callable[[str], T]) -> tuple[T, ...]:
    with _as_one(name):
        return tuple(read(key) for key in keys)


@contextmanager
def _as_one(name: str) -> Iterator[None]:
    """A slot file whose KV is gone is damaged."""
    try:
        yield
    except NotFound as error:
        raise Damaged(f"the slot file {name} needs KV that is gone: {error}") from error
