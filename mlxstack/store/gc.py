"""Garbage collection on disk, by age and bytes, of unused files.

KV files that a saved context names stay as long as that context does. First go the contexts
and the unnamed files that are too old; then, until the bytes fit, unnamed files, and then
whole contexts with the files that only they named: each time the least recently used first.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path

from msgspec import Struct

from mlxstack.core.commands import GCItem, GCResult
from mlxstack.core.errors import Conflict, Damaged, DiskFull, NotFound, UnknownVersion, Unreadable
from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import AUTO
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.files import Disk, because, sync_directory
from mlxstack.store.kv_store import DiskKVStore, KVFileEntry
from mlxstack.store.slot_files import SlotFileFolder

log = logging.getLogger(__name__)

Ref = tuple[str, str]
MIN_FREE_PCT = 10
"""Percent of a volume that `prefix_cache.disk.max_bytes: auto` leaves free."""


class VolumeSpace(Struct, frozen=True):
    """Bytes of a volume."""

    n_free: int
    n_total: int

    @property
    def n_spare(self) -> int:
        """Bytes that may be written; negative below the part that stays free."""
        return self.n_free - -(-self.n_total * MIN_FREE_PCT // 100)


def space_of(path: Path) -> VolumeSpace:
    """Space of the volume of `path`, which may be gone. Raises OSError."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    return VolumeSpace(usage.free, usage.total)


def automatic_limit(n_used: int, space: VolumeSpace) -> int:
    """Bytes of KV that `auto` allows, `n_used` stored ones included."""
    return max(0, n_used + space.n_spare)


class GCReason(StrEnum):
    """Reason for a deletion."""

    AGE = "age"
    BYTES = "bytes"


class StoredContext(Struct, frozen=True):
    """Slot file or agent manifest; `refs` identify its KV files.

    A ref is (identity, key).
    """

    title: str
    path: str
    n_bytes: int
    used_at: float
    refs: frozenset[Ref] = frozenset()
    agent: str | None = None


class DiskInventory(Struct, frozen=True):
    """Files on disk, and those to keep: KV refs, context paths."""

    files: tuple[KVFileEntry, ...]
    contexts: tuple[StoredContext, ...] = ()
    in_use: frozenset[Ref] = frozenset()
    protected: frozenset[str] = frozenset()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        contexts = sum(context.n_bytes for context in self.contexts)
        return contexts + sum(file.n_bytes for file in self.files)


class GCRules(Struct, frozen=True):
    """Bounds of a collection, None for none; `n_wanted` bytes must fit.

    What was used in the last `grace_s` seconds never goes: another process may be saving it.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None
    n_wanted: int = 0
    grace_s: float = 300.0


class CollectedFile(Struct, frozen=True):
    """File to delete unless used since `used_at`; `refs` of a context."""

    item: GCItem
    used_at: float
    refs: frozenset[Ref] = frozenset()


class GCPlan(Struct, frozen=True):
    """Files to delete, contexts first; afterwards `n_after` bytes remain, `n_over` too many."""

    files: tuple[CollectedFile, ...] = ()
    n_before: int = 0
    n_after: int = 0
    n_over: int = 0


def plan(stock: DiskInventory, rules: GCRules, now: float) -> GCPlan:
    """Decide; nothing is touched. `now` is Unix seconds."""
    sweep = _Collection(stock, now - rules.grace_s)
    if rules.max_age_s is not None:
        sweep.drop_older(now - rules.max_age_s)
    limit = sweep.n_bytes
    if rules.max_bytes is not None:
        limit = rules.max_bytes - rules.n_wanted
        sweep.drop_beyond(limit)
    doomed = (*sweep.contexts_gone.values(), *sweep.blobs_gone.values())
    n_after = sweep.n_bytes
    return GCPlan(doomed, sweep.n_before, n_after, max(0, n_after - limit))


def of_agent(stock: DiskInventory, agent: str) -> DiskInventory:
    """Contexts of `agent`, and the KV files that only they name."""
    mine = tuple(context for context in stock.contexts if context.agent == agent)
    named = frozenset[Ref]().union(*(context.refs for context in mine))
    refs = (context.refs for context in stock.contexts if context.agent != agent)
    alone = named.difference(*refs)
    files = tuple(file for file in stock.files if (file.identity, file.key) in alone)
    return DiskInventory(files, mine, stock.in_use, stock.protected)


def check_room(decided: GCPlan, limit: int | str | None = None) -> None:
    """Raise DiskFull when the plan frees too little for this `max_bytes`."""
    if decided.n_over and limit == AUTO:
        raise DiskFull(
            f"not saved: prefix_cache.disk.max_bytes is auto, which leaves {MIN_FREE_PCT} percent "
            f"of the volume free, and {decided.n_over} bytes are missing; free some space, or set "
            "it to a number of bytes"
        )
    if decided.n_over:
        raise DiskFull(
            f"not saved: prefix_cache.disk.max_bytes would be exceeded by {decided.n_over} bytes "
            "and the rest is in use; raise it, or remove what is saved with `mlx-stack slots gc`"
        )


def carry_out(decided: GCPlan, disk: Disk) -> GCResult:
    """Delete the planned files; those used since, or undeletable, are skipped.

    KV goes only when the removal of its contexts is certain to outlive a power loss.
    """
    contexts = [doomed for doomed in decided.files if doomed.item.ref is None]
    skipped = {doomed.item.path: reason for doomed in contexts if (reason := _delete(doomed))}
    staying = [doomed for doomed in contexts if doomed.item.path in skipped]
    unsettled = _unsettled({Path(c.item.path).parent for c in contexts if c not in staying}, disk)
    staying += [doomed for doomed in contexts if Path(doomed.item.path).parent in unsettled]
    named = frozenset[Ref]().union(*(doomed.refs for doomed in staying))
    for doomed in decided.files:
        if doomed.item.ref is not None:
            reason = "its context stays" if doomed.item.ref in named else _delete(doomed)
            if reason:
                skipped[doomed.item.path] = reason
    deleted = [doomed.item for doomed in decided.files if doomed.item.path not in skipped]
    n_bytes = sum(item.n_bytes for item in deleted)
    if deleted:
        log.info("disk: %d files of %d bytes deleted", len(deleted), n_bytes)
    gone = tuple(doomed.item for doomed in decided.files if not Path(doomed.item.path).exists())
    reasons = tuple(f"{path}: {reason}" for path, reason in skipped.items())
    return GCResult(gone, decided.n_before, decided.n_before - n_bytes, reasons)


def _unsettled(folders: set[Path], disk: Disk) -> set[Path]:
    """Folders whose names could not be flushed."""
    unsettled = set()
    for folder in folders:
        try:
            sync_directory(folder, disk.sync)
        except OSError:
            unsettled.add(folder)
    return unsettled


class _Collection:
    """Remaining files of a plan; only those used before `young` go."""

    def __init__(self, stock: DiskInventory, young: float) -> None:
        self.n_before = stock.n_bytes
        self.n_bytes = self.n_before
        self.contexts_gone: dict[str, CollectedFile] = {}
        self.blobs_gone: dict[Ref, CollectedFile] = {}
        self._names = Counter(ref for context in stock.contexts for ref in context.refs)
        self._contexts = sorted(
            (c for c in stock.contexts if c.path not in stock.protected and c.used_at < young),
            key=lambda context: context.used_at,
        )
        self._files = {
            (file.identity, file.key): file
            for file in sorted(stock.files, key=_warmth)
            if (file.identity, file.key) not in stock.in_use and file.used_at < young
        }

    def drop_older(self, moment: float) -> None:
        for context in self._contexts:
            if context.used_at < moment:
                self._drop_context(context, GCReason.AGE)
        for ref in self._unnamed(self._files):
            if self._files[ref].used_at < moment:
                self._drop_blob(ref, GCReason.AGE)

    def drop_beyond(self, limit: int) -> None:
        contexts = [c for c in self._contexts if c.path not in self.contexts_gone]
        for victim in self._victims(contexts):
            if self.n_bytes <= limit:
                break
            if isinstance(victim, StoredContext):
                self._drop_context(victim, GCReason.BYTES)
            else:
                self._drop_blob(victim, GCReason.BYTES)
        self._spare(contexts, limit)

    def _victims(self, contexts: list[StoredContext]) -> Iterator[Ref | StoredContext]:
        yield from self._unnamed(self._files)
        for context in contexts:
            yield context
            named = [ref for ref in context.refs if ref in self._files]
            yield from self._unnamed(sorted(named, key=lambda ref: _warmth(self._files[ref])))

    def _unnamed(self, refs: Iterable[Ref]) -> list[Ref]:
        return [ref for ref in refs if not self._names[ref] and ref not in self.blobs_gone]

    def _spare(self, contexts: list[StoredContext], limit: int) -> None:
        """Restore contexts that free no KV, the last used first."""
        for context in reversed(contexts):
            is_gone = context.path in self.contexts_gone
            is_whole = context.refs.isdisjoint(self.blobs_gone)
            if is_gone and is_whole and self.n_bytes + context.n_bytes <= limit:
                del self.contexts_gone[context.path]
                self.n_bytes += context.n_bytes

    def _drop_context(self, context: StoredContext, reason: GCReason) -> None:
        self._names.subtract(context.refs)
        self.n_bytes -= context.n_bytes
        item = GCItem(context.title, context.path, context.n_bytes, reason)
        self.contexts_gone[context.path] = CollectedFile(item, context.used_at, context.refs)

    def _drop_blob(self, ref: Ref, reason: GCReason) -> None:
        file = self._files[ref]
        self.n_bytes -= file.n_bytes
        item = GCItem(f"KV {file.key}", file.path, file.n_bytes, reason, ref)
        self.blobs_gone[ref] = CollectedFile(item, file.used_at)


def _warmth(file: KVFileEntry) -> tuple[float, float, str]:
    # A chain is read from its head within moments, and is worthless without it: tail first.
    return file.used_at // 60, -file.used_at, file.key


def _delete(doomed: CollectedFile) -> str:
    path = Path(doomed.item.path)
    try:
        if path.lstat().st_mtime != doomed.used_at:
            return "it was used meanwhile"
        path.unlink()
    except FileNotFoundError:
        return "it is gone already"
    except OSError as error:
        return because(error)
    return ""


def scan_disk(
    store: DiskKVStore,
    shelves: Iterable[SlotFileFolder],
    agents: AgentFolders,
    in_use: frozenset[Ref] = frozenset(),
) -> DiskInventory:
    """Scan KV files and saved contexts; `shelves` are all slot folders.

    If a slot folder is missing from `shelves`, its KV files look unreferenced. Damaged files are
    contexts that name nothing. A saved context of an agent in another format version stays, with
    all KV files and contexts of its identity. Raises Conflict when a context cannot be read now, or
    when a slot file has another format version: it may name anything.
    """
    # The contexts last: one that is saved meanwhile names files that were listed before.
    files = tuple(store.entries())
    try:
        saved = tuple(_agents(agents, files))
        contexts = (
            *(c for slot_files in shelves for c in _slots(slot_files)),
            *(c for c, _ in saved),
        )
    except Unreadable as error:
        raise Conflict(f"nothing was deleted: {error.message}") from error
    except UnknownVersion as error:
        raise Conflict(
            f"nothing was deleted: {error.message}. It may need any stored KV: sweep with that "
            "release, or delete the file"
        ) from error
    opaque = {identity for _, identity in saved if identity is not None}
    retained = {c.path for c in contexts if any(identity in opaque for identity, _ in c.refs)}
    retained |= {c.path for c, identity in saved if identity is not None}
    return DiskInventory(files, contexts, in_use, frozenset(retained))


def _slots(slot_files: SlotFileFolder) -> Iterator[StoredContext]:
    for file in slot_files.list():
        title = f"slot file {file.name}"
        refs = _refs(title, partial(slot_files.peek, file))
        yield StoredContext(title, file.path, file.n_bytes, file.used_at, refs)


def _agents(
    agents: AgentFolders, files: tuple[KVFileEntry, ...]
) -> Iterator[tuple[StoredContext, str | None]]:
    """Saved contexts, with the KV identity of unreadable ones."""
    for file in agents.manifests():
        title = f"agent {file.agent} ({file.model[:8]})"
        opaque = None
        try:
            refs = _refs(title, partial(agents.peek_manifest, file.agent, file.model))
        except UnknownVersion:
            opaque = file.model
            refs = frozenset((b.identity, b.key) for b in files if b.identity == opaque)
        context = StoredContext(title, file.path, file.n_bytes, file.used_at, refs, file.agent)
        yield context, opaque


def _refs(title: str, peek: Callable[[], Manifest]) -> frozenset[Ref]:
    try:
        manifest = peek()
    except Unreadable as error:
        raise Unreadable(f"{title}: {error.message}") from error
    except UnknownVersion:
        raise
    except (Damaged, NotFound):
        return frozenset()
    keys = (*manifest.segments, *manifest.checkpoints)
    return frozenset((manifest.identity, key) for key in keys)
