"""Disk tier: writes segments once, reads them, and saves slot files.

Arrays are touched on the MLX thread only; files by a writer and a reader thread, which post
their results back to the MLX thread.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from msgspec.structs import replace

from mlxstack.core.commands import SlotRestoreResult, SlotSaveResult
from mlxstack.core.errors import Damaged, StackError, Unsupported, describe_error
from mlxstack.core.interfaces import (
    AgentManifestStore,
    CallSoon,
    KVFile,
    KVFileHeader,
    KVStore,
    Manifest,
    SlotFileStore,
)
from mlxstack.core.prompt_tokens import TokenRow, kept
from mlxstack.engine.kv.kv_layouts import KVLayouts
from mlxstack.engine.kv.park import ContextParker, IndexedContext
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import Segment, parents_first, record_of
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.kv.slot_restore import RestoreRequest, SlotRestore
from mlxstack.engine.kv.write_queue import WriteQueue
from mlxstack.policy.kv import checkpoint_writes, prefix_index
from mlxstack.policy.kv.checkpoint_writes import CheckpointSize, WrittenContext
from mlxstack.policy.kv.prefix_index import Record
from mlxstack.policy.kv.reuse_plan import ReusePlan
from mlxstack.policy.kv.shared_prefixes import SharedPrefixes

log = logging.getLogger(__name__)


class DiskTier:
    """One per engine. `post` runs a function on the MLX thread, soon."""

    def __init__(
        self,
        store: KVStore,
        slot_files: SlotFileStore,
        prefix_cache: PrefixCache,
        layouts: KVLayouts,
        post: CallSoon,
        manifests: AgentManifestStore | None = None,
    ) -> None:
        self._is_written = prefix_cache.spec.enabled and prefix_cache.spec.disk.enabled
        note = self._note if self._is_written else None
        shared = SharedPrefixes(prefix_cache.spec.block_size, note)
        self.parker = ContextParker(prefix_cache, shared)
        self._manifests = manifests
        self._store = store
        self._slot_files = slot_files
        self._prefix_cache = prefix_cache
        self._identity = prefix_cache.identity
        self.layouts = layouts
        self._post = post
        self.writing = WriteQueue(prefix_cache, store, post)
        self.has_deferred = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._restoring = SlotRestore(
            store,
            slot_files,
            self._identity,
            layouts,
            prefix_cache.chains,
            self._reader,
            post,
            self._anchor,
        )

    def open(self) -> int:
        """Index the records of earlier runs on disk; how many."""
        if not self._is_written:
            return 0
        self.parker.shared_prefixes.recall(self._store.noted(self._identity))
        now = time.monotonic()
        n_known = 0
        for head in sorted(self._store.headers(self._identity), key=parents_first):
            try:
                self._prefix_cache.on_disk(record_of(head), now)
                n_known += 1
            except KeyError as gone:
                log.warning(
                    "the KV file %s is ignored: it continues %s, which is gone",
                    head.key,
                    *gone.args,
                )
            except (AssertionError, Damaged) as error:
                log.warning("the KV file %s is ignored: %s", head.key, error)
        return n_known

    def index_due(self, context: SlotContext, *, is_leaving: bool) -> IndexedContext:
        """Index what of a context is to be on disk now."""
        now = time.monotonic()
        indexed = self.parker.index_segments(context, now)
        due = self._due(context, indexed, is_leaving=is_leaving)
        chosen = [c for c in context.checkpoints if c.position in due]
        return self.parker.index_checkpoints(context, indexed, chosen, now)

    def due_of(self, context: SlotContext, parked: IndexedContext) -> IndexedContext:
        """The part of a parked context that is to be on disk."""
        due = self._due(context, parked, is_leaving=True)
        marks = zip(context.checkpoints, parked.checkpoints, strict=True)
        chosen = tuple(key for mark, key in marks if mark.position in due)
        self._prefix_cache.keep_off_disk(set(parked.checkpoints).difference(chosen))
        return replace(parked, checkpoints=chosen)

    def write(self, indexed: IndexedContext, *, is_deferred: bool = False) -> None:
        """Write in the background what of the context is in memory alone."""
        new = [key for key in indexed.keys if not self._prefix_cache.is_on_disk(key)]
        self.writing.write(new, is_deferred=is_deferred)
        self.has_deferred |= is_deferred

    def submit_pending(self, *, is_busy: bool) -> None:
        """Submit what waits; while the engine is busy only what is due."""
        self.has_deferred = self.writing.submit_pending(is_busy=is_busy)

    def write_rest(self) -> None:
        """Write all records that lie in memory alone and may be on disk."""
        keys = (key for key in self._prefix_cache.index.nodes if self._is_unwritten(key))
        self.writing.write([key for key in keys if not self._prefix_cache.is_off_disk(key)])

    def is_foreign(self, agent: str) -> bool:
        """Whether this agent has saved KV, but of other models only."""
        identities = self._manifests.identities(agent) if self._manifests else frozenset[str]()
        return bool(identities) and self._identity not in identities

    def catch_up(self) -> None:
        """Wait until all that waits to be written is durable."""
        self.writing.catch_up()
        try:
            self._store.flush()
        except StackError as error:
            log.warning("%s; a power cut may lose them", error)

    def check(self, context: SlotContext, name: str) -> None:
        """Raise BadRequest for a bad name, Conflict for a foreign file.

        Raises Unsupported for caches that cannot be stored.
        """
        self._slot_files.check_replaceable(name)
        if not context.is_storable:
            raise Unsupported("this model keeps a kind of cache that cannot be stored", "action")

    def save(
        self, context: SlotContext, slot: int, name: str, started: float
    ) -> "Future[SlotSaveResult]":
        """Write missing KV, then the slot file; timed from `started`.

        After `check`.
        """
        indexed = self._index(context)
        written = self._begin_writing(indexed)
        manifest = self._manifest(context, context.salt, indexed)

        def finish() -> SlotSaveResult:
            n_written = written()
            if self._missing(manifest):
                raise StackError(f"{name} was not written: a part of its KV did not reach the disk")
            self._store.flush()
            n_written += self._slot_files.write(name, manifest)
            took = 1000 * (time.perf_counter() - started)
            return SlotSaveResult(
                slot, name, len(manifest.tokens), n_written, manifest.n_bytes, took
            )

        return self.writing.after(finish)

    def put(
        self, context: SlotContext, indexed: IndexedContext, *, is_deferred: bool = False
    ) -> None:
        """Verify a written context, and record it for its agent.

        Missing records are written again when the context is stored the next time.
        """
        agent = context.agent
        manifests = self._manifests
        written = self._written_checkpoints(context, indexed)
        named = tuple(dict.fromkeys((*written, *indexed.checkpoints)))
        manifest = self._manifest(context, context.salt, replace(indexed, checkpoints=named))

        def finish() -> None:
            if missing := self._missing(manifest):
                self._post(partial(self._invalidate, missing))
                raise StackError("a part of its KV did not reach the disk")
            if agent is not None and manifests is not None:
                self._store.flush()
                manifests.put(agent, manifest)

        noting = self.writing.after(finish, is_deferred=is_deferred)
        noting.add_done_callback(lambda done: _warn(agent, done.exception()))

    def restore(self, request: RestoreRequest) -> "Future[SlotRestoreResult]":
        """Restore a slot file into the context; see `SlotRestore`."""
        self._slot_files.check(request.name)
        return self._restoring.start(request)

    def load(self, keys: Sequence[str], then: Callable[[], None]) -> None:
        """Load records into memory, then call `then` on the MLX thread.

        Records that cannot be read are invalidated; `then` has to look again.
        """
        self._prefix_cache.index.lock(keys)
        reading = self._reader.submit(self._read_all, keys)
        reading.add_done_callback(
            lambda done: self._post(lambda: self._loaded(keys, done.result(), then))
        )

    def export(self, plan: ReusePlan, row: TokenRow, salt: str) -> "Future[Manifest]":
        """Write a plan's KV for these tokens; returns its manifest."""
        segments = tuple(step.key for step in plan.path)
        indexed = IndexedContext(segments, (plan.checkpoint,) if plan.checkpoint else (), ())
        written = self._begin_writing(indexed)
        manifest = self._manifest(kept(row, 0, plan.position), salt, indexed)

        def finish() -> Manifest:
            written()
            if self._missing(manifest):
                raise StackError("a part of the KV did not reach the disk")
            return manifest

        return self.writing.after(finish)

    def adopt(
        self,
        manifest: Manifest,
        records_of: Callable[[Manifest, Sequence[KVFileHeader]], Sequence[Record]],
        done: "Future[int]",
    ) -> None:
        """Index the files of another service; the future has their tokens.

        `records_of` raises Damaged when they are not what the manifest says; so does the future.
        """
        keys = (*manifest.segments, *manifest.checkpoints)

        def insert(reading: "Future[list[KVFileHeader]]") -> None:
            try:
                for record in records_of(manifest, reading.result()):
                    self._prefix_cache.on_disk(record, time.monotonic())
                done.set_result(len(manifest.tokens))
            except StackError as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(Damaged(f"KV of another service does not fit: {error!r}"))

        reading = self._reader.submit(
            lambda: [self._store.head(self._identity, key) for key in keys]
        )
        reading.add_done_callback(lambda done_reading: self._post(lambda: insert(done_reading)))

    def close(self) -> None:
        """Finish what waits to be written."""
        self.writing.close()
        self._reader.shutdown(wait=True)

    def _note(self, data: bytes) -> None:
        """Save a note beside the KV; failures leave it for later."""
        self.writing.after(lambda: self._store.note(self._identity, data))

    def _anchor(self, context: SlotContext, manifest: Manifest) -> None:
        if manifest.segments and manifest.segments[-1] in self._prefix_cache.index.nodes:
            context.set_parent_segment(manifest.segments[-1])

    def _begin_writing(self, indexed: IndexedContext) -> Callable[[], int]:
        """Write what is in memory alone; a job that waits for it.

        The job, of the writer thread, returns the bytes newly written.
        """
        begun = self.writing.promised(indexed.keys)
        writes = self.writing.write([key for key in indexed.keys if self._is_unwritten(key)])
        self.writing.hold(indexed.keys)

        def written() -> int:
            # One writer thread: the writes before this one are over.
            for write in begun:
                write.result()
            return sum(write.result() for write in writes)

        return written

    def _manifest(self, row: TokenRow, salt: str, indexed: IndexedContext) -> Manifest:
        nodes = self._prefix_cache.index.nodes
        return Manifest(
            identity=self._identity,
            tokens=tuple(row.tokens),
            segments=indexed.segments,
            checkpoints=indexed.checkpoints,
            n_bytes=sum(nodes[key].record.n_bytes for key in indexed.keys),
            salt=salt,
            images=tuple(row.images),
        )

    def _missing(self, manifest: Manifest) -> list[str]:
        """KV files of a manifest that are not on disk.

        The check marks files as used, so that garbage collection keeps them.
        """
        keys = (*manifest.segments, *manifest.checkpoints)
        return [key for key in keys if not self._store.has(self._identity, key)]

    def _due(
        self, context: SlotContext, indexed: IndexedContext, *, is_leaving: bool
    ) -> tuple[int, ...]:
        """Positions of a context's checkpoints to write now."""
        if not context.checkpoints:
            return ()
        nodes = self._prefix_cache.index.nodes
        written = self._written_checkpoints(context, indexed)
        sizes = tuple(CheckpointSize(c.position, c.n_bytes) for c in context.checkpoints)
        ends = frozenset(prefix_index.end_of(nodes[key].record) for key in written)
        n_bytes = sum(nodes[key].record.n_bytes for key in indexed.segments)
        token_bytes = n_bytes / max(len(context), 1)
        facts = WrittenContext(sizes, ends, token_bytes, context.n_prompt)
        return checkpoint_writes.due(facts, is_leaving=is_leaving)

    def _written_checkpoints(
        self, context: SlotContext, indexed: IndexedContext
    ) -> tuple[str, ...]:
        """Checkpoints of these tokens that are on disk, or about to be, ascending."""
        if not indexed.segments:
            return ()
        index = self._prefix_cache.index
        path = prefix_index.reach(index, indexed.segments[-1], len(context))
        return tuple(
            key
            for key in prefix_index.checkpoints_on(index, path)
            if self._prefix_cache.is_on_disk(key) or self.writing.promised((key,))
        )

    def _index(self, context: SlotContext) -> IndexedContext:
        indexed = self.parker.index_context(context, time.monotonic())
        lost = [key for key in indexed.keys if self._is_invalidated(key)]
        if not lost:
            return indexed
        self._invalidate(lost)
        return self.parker.index_context(context, time.monotonic())

    def _invalidate(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._prefix_cache.invalidate(key)

    def _is_invalidated(self, key: str) -> bool:
        """Whether the index has a file that is gone."""
        return self._prefix_cache.get(key) is None and not self._store.has(self._identity, key)

    def _is_unwritten(self, key: str) -> bool:
        """Whether a record is in memory and neither on disk nor pending.

        A file that the index does not know may lack its parent: the store compares headers.
        """
        if self.writing.promised((key,)) or self._prefix_cache.get(key) is None:
            return False
        return not (self._prefix_cache.is_on_disk(key) and self._store.has(self._identity, key))

    def _loaded(
        self, keys: Sequence[str], files: dict[str, KVFile | StackError], then: Callable[[], None]
    ) -> None:
        self._prefix_cache.index.unlock(keys)
        for key in keys:
            node = self._prefix_cache.index.nodes.get(key)
            try:
                # The bytes of the file go as soon as they are arrays.
                part = self._part(files.pop(key))
            except StackError as error:
                if node is not None:
                    log.warning("KV could not be read: %s", error)
                    self._prefix_cache.invalidate(key)
                continue
            if node is None:  # lost with what it continues
                self._prefix_cache.note_unused(key)
            else:
                self._prefix_cache.put(node.record, part, time.monotonic())
        then()

    def _part(self, file: KVFile | StackError) -> Segment | StateCheckpoint:
        """Arrays of a file. Raises Damaged, or the error of its read."""
        if isinstance(file, StackError):
            raise file
        return self.layouts.part_of(file)

    def _read_all(self, keys: Sequence[str]) -> dict[str, KVFile | StackError]:
        files: dict[str, KVFile | StackError] = {}
        for key in keys:
            try:
                files[key] = self._store.read(self._identity, key)
            except Exception as error:
                files[key] = describe_error(error, "reading KV")
        return files


def _warn(agent: str | None, error: BaseException | None) -> None:
    if agent is not None and error is not None:
        log.warning("what is saved of agent %s was not noted: %s", agent, error)
