"""The disk side of the KV memory: writes segments once, reads them back, keeps slot files.

Arrays are touched on the MLX thread only; files by a writer and a reader thread. What they have
to say is posted back to the MLX thread.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from msgspec import Struct

from mlxstack.core.act import Restored, Saved, Swept
from mlxstack.core.errors import Busy, Damaged, NotFound, StackError, Unsupported
from mlxstack.core.ports import Blob, Manifest, Manifests, Post, Shelf, Vault
from mlxstack.engine import segments
from mlxstack.engine.context import Checkpoint, Context
from mlxstack.engine.kv_file import blob_of, check_cover, parents_first, part_of, record_of
from mlxstack.engine.memory import Memory
from mlxstack.engine.segments import Segment
from mlxstack.engine.shelving import Shelved, Shelving
from mlxstack.engine.sweeping import Sweeping
from mlxstack.policy import records
from mlxstack.store.writer import Writer

log = logging.getLogger(__name__)


class Fetched(Struct, frozen=True):
    """A slot file with all its blobs, read and checked."""

    name: str
    manifest: Manifest
    segments: tuple[Blob, ...]
    checkpoints: tuple[Blob, ...]
    started: float


class Archive:
    """One per engine. `post` runs a function on the MLX thread, soon."""

    def __init__(
        self, vault: Vault, shelf: Shelf, memory: Memory, identity: str, post: Post
    ) -> None:
        self.manifests: Manifests | None = None
        self.shelving = Shelving(memory)
        self._vault = vault
        self._shelf = shelf
        self._memory = memory
        self._identity = identity
        self._post = post
        self._writer = Writer()
        self.sweeping = Sweeping(memory, vault, identity, self._writer, post)
        self._n_written = 0
        self._under_way: dict[str, Future[int]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def open(self) -> int:
        """Take what earlier runs left on disk into the index; how many records."""
        self.shelving.learning.recall(self._vault.noted(self._identity))
        self.shelving.learning.keep = self._note
        now, n_known = time.monotonic(), 0
        for head in sorted(self._vault.heads(self._identity), key=parents_first):
            try:
                self._memory.on_disk(record_of(head), now)
                n_known += 1
            except (KeyError, AssertionError, Damaged) as error:
                log.warning("the KV file %s is ignored: %s", head.key, error)
        return n_known

    def write(self, keys: Sequence[str]) -> list[Future[int]]:
        """Write these records in the background; those in memory only. Raises Busy.

        Room is made before the first of them; where there is none, all futures raise DiskFull.
        """
        room = self.sweeping.make_room(keys) if keys else None
        return [self._write(key, room) for key in keys if room is not None]

    def write_through(self, keys: Sequence[str]) -> None:
        """As `write`, if the writer keeps up; what it cannot take stays in memory alone."""
        try:
            self.write(keys)
        except Busy as error:
            log.warning("not written to disk: %s", error)

    def write_rest(self) -> None:
        """Write what lies in memory alone, and wait for the disk."""
        for key in tuple(self._memory.index.nodes):
            if self._is_unwritten(key):
                self.catch_up()
                self.write_through((key,))

    def catch_up(self) -> None:
        """Wait until nothing waits to be written."""
        self._writer.drain()

    @property
    def n_written(self) -> int:
        """Bytes newly written so far."""
        return self._n_written

    def save(self, context: Context, slot: int, name: str) -> "Future[Saved]":
        """Write what is not on disk yet, the slot file last.

        Raises BadRequest for a bad name, Unsupported for a model whose caches cannot be stored,
        Busy when the writer is too far behind.
        """
        started = time.perf_counter()
        self._shelf.check(name)
        if not context.is_storable:
            raise Unsupported("this model keeps a kind of cache that cannot be stored", "action")
        shelved = self._shelve(context)
        keys = (*shelved.segments, *shelved.checkpoints)
        under_way = [self._under_way[key] for key in keys if key in self._under_way]
        writes = self.write([key for key in keys if self._is_unwritten(key)])
        manifest = self._manifest(context, shelved)

        def finish() -> Saved:
            # One writer thread: the writes before this one are over.
            for write in under_way:
                write.result()
            n_written = sum(write.result() for write in writes)
            if not self._is_whole(manifest):
                raise StackError(f"{name} was not written: a part of its KV did not reach the disk")
            n_written += self._shelf.write(name, manifest)
            took = 1000 * (time.perf_counter() - started)
            return Saved(slot, name, len(manifest.tokens), n_written, manifest.n_bytes, took)

        return self._writer.submit(finish)

    def keep(self, agent: str, context: Context, shelved: Shelved) -> None:
        """Note what is saved of this agent, once all of it is written."""
        manifests, manifest = self.manifests, self._manifest(context, shelved)
        if manifests is None:
            return

        def finish() -> None:
            if self._is_whole(manifest):
                manifests.keep(agent, manifest)

        try:
            noting = self._writer.submit(finish)
        except Busy as error:
            log.warning("what is saved of agent %s was not noted: %s", agent, error)
        else:
            noting.add_done_callback(lambda done: _warn(agent, done.exception()))

    def fetch(self, name: str) -> Future[Fetched]:
        """Read and check a slot file and all it names. The future raises NotFound or Damaged."""
        started = time.perf_counter()
        self._shelf.check(name)
        return self._reader.submit(self._fetch, name, started)

    def install(self, context: Context, fetched: Fetched, slot: int) -> Restored:
        """Make the fetched state the slot's context. On any error the context is as it was."""
        manifest = fetched.manifest
        n_tokens = len(manifest.tokens)
        fresh = context.fresh(n_tokens)
        if n_tokens:
            parts = [part for b in fetched.segments if isinstance(part := part_of(b), Segment)]
            marks = [m for b in fetched.checkpoints if isinstance(m := part_of(b), Checkpoint)]
            fresh.adopt(manifest.tokens, segments.spans(fresh, parts, n_tokens), marks)
        context.become(fresh)
        context.n_prompt = n_tokens
        if manifest.segments and manifest.segments[-1] in self._memory.index.nodes:
            context.anchor(manifest.segments[-1])
        took = 1000 * (time.perf_counter() - fetched.started)
        return Restored(slot, fetched.name, n_tokens, manifest.n_bytes, took)

    def load(self, keys: Sequence[str], then: Callable[[], None]) -> None:
        """Bring records from disk into memory, then call `then` on the MLX thread.

        What cannot be read is forgotten; `then` has to look again.
        """
        self._memory.index.lock(keys)
        reading = self._reader.submit(self._read_all, keys)
        reading.add_done_callback(
            lambda done: self._post(lambda: self._loaded(keys, done.result(), then))
        )

    def close(self) -> None:
        """Finish what waits to be written."""
        self._writer.close()
        self._reader.shutdown(wait=True)

    def _note(self, data: bytes) -> None:
        """Keep this beside the KV; the next note makes up for one that was not kept."""
        with suppress(Busy):
            self._writer.submit(lambda: self._vault.note(self._identity, data))

    def _manifest(self, context: Context, shelved: Shelved) -> Manifest:
        keys = (*shelved.segments, *shelved.checkpoints)
        return Manifest(
            identity=self._identity,
            tokens=tuple(context.tokens),
            segments=shelved.segments,
            checkpoints=shelved.checkpoints,
            n_bytes=sum(self._memory.index.nodes[key].record.n_bytes for key in keys),
        )

    def _is_whole(self, manifest: Manifest) -> bool:
        """Whether all that it names is on disk. Asking is using: a sweep leaves it alone."""
        keys = (*manifest.segments, *manifest.checkpoints)
        return all(self._vault.has(self._identity, key) for key in keys)

    def _shelve(self, context: Context) -> Shelved:
        shelved = self.shelving.shelve(context, time.monotonic())
        lost = [k for k in (*shelved.segments, *shelved.checkpoints) if self._is_lost(k)]
        if not lost:
            return shelved
        for key in lost:
            self._memory.lose(key)
        return self.shelving.shelve(context, time.monotonic())

    def _is_lost(self, key: str) -> bool:
        """Whether the index believes in a file that is no longer there."""
        return self._memory.array_of(key) is None and not self._vault.has(self._identity, key)

    def _is_unwritten(self, key: str) -> bool:
        """Whether it has to be written: in memory, and not on disk or on its way."""
        node = self._memory.index.nodes[key]
        if node.is_writing or self._memory.array_of(key) is None:
            return False
        return not self._vault.has(self._identity, key)

    def _write(self, key: str, room: "Future[Swept]") -> Future[int]:
        node = self._memory.index.nodes[key]
        part = self._memory.array_of(key)
        assert part is not None, f"{key} is not in memory"
        blob = blob_of(node.record, part, self._identity)
        future = self.sweeping.write(room, blob)
        future.add_done_callback(self._count)
        self._under_way[key] = future
        self._memory.index.set_writing(key, True)
        future.add_done_callback(lambda done: self._post(lambda: self._written(key, done)))
        return future

    def _count(self, done: "Future[int]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._n_written += done.result()

    def _written(self, key: str, done: "Future[int]") -> None:
        self._under_way.pop(key, None)
        node = self._memory.index.nodes.get(key)
        if node is None:
            return
        self._memory.index.set_writing(key, False)
        error = done.exception()
        if error is None:
            self._memory.on_disk(node.record, time.monotonic())
        else:
            log.warning(
                "the KV of %d tokens was not written: %s", records.end_of(node.record), error
            )

    def _loaded(
        self, keys: Sequence[str], blobs: dict[str, Blob | StackError], then: Callable[[], None]
    ) -> None:
        self._memory.index.unlock(keys)
        for key, blob in blobs.items():
            if isinstance(blob, Blob):
                record = self._memory.index.nodes[key].record
                self._memory.keep(record, part_of(blob), time.monotonic())
            else:
                log.warning("KV could not be read: %s", blob)
                self._memory.lose(key)
        then()

    def _read_all(self, keys: Sequence[str]) -> dict[str, Blob | StackError]:
        found: dict[str, Blob | StackError] = {}
        for key in keys:
            try:
                found[key] = self._vault.read(self._identity, key)
            except StackError as error:
                found[key] = error
        return found

    def _fetch(self, name: str, started: float) -> Fetched:
        manifest = self._shelf.read(name)
        if manifest.identity != self._identity:
            raise Damaged(
                f"the slot file {name} was saved with another model, adapter or KV precision"
            )
        blobs = tuple(self._read(name, key) for key in manifest.segments)
        marks = tuple(self._read(name, key) for key in manifest.checkpoints)
        check_cover(name, manifest, blobs)
        return Fetched(name, manifest, blobs, marks, started)

    def _read(self, name: str, key: str) -> Blob:
        try:
            return self._vault.read(self._identity, key)
        except NotFound as error:
            raise Damaged(f"the slot file {name} needs KV that is gone: {error}") from error


def _warn(agent: str, error: BaseException | None) -> None:
    if error is not None:
        log.warning("what is saved of agent %s was not noted: %s", agent, error)
