"""Disk scan for garbage collection: KV files, and saved contexts with refs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from mlxstack.core.errors import Conflict, Damaged, NotFound, UnknownVersion, Unreadable
from mlxstack.core.ports import Manifest
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.gc import DiskInventory, Ref, StoredContext
from mlxstack.store.kv_store import DiskKVStore, KVFileEntry
from mlxstack.store.slot_files import SlotFileFolder


def scan_disk(
    store: DiskKVStore,
    shelves: Iterable[SlotFileFolder],
    agents: AgentFolders,
    in_use: frozenset[Ref] = frozenset(),
    spared: frozenset[str] = frozenset(),
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
    kept = {c.path for c in contexts if any(identity in opaque for identity, _ in c.refs)}
    kept |= {c.path for c, identity in saved if identity is not None}
    return DiskInventory(files, contexts, in_use, spared | kept)


def _slots(slot_files: SlotFileFolder) -> Iterator[StoredContext]:
    for file in slot_files.list():
        title = f"slot file {file.name}"
        refs = _refs(title, partial(slot_files.peek_listed, file))
        yield StoredContext(title, file.path, file.n_bytes, file.used_at, refs)


def _agents(
    agents: AgentFolders, files: tuple[KVFileEntry, ...]
) -> Iterator[tuple[StoredContext, str | None]]:
    """Saved contexts, with the KV identity of unreadable ones."""
    for file in agents.manifests():
        title, opaque = f"agent {file.agent} ({file.model[:8]})", None
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
