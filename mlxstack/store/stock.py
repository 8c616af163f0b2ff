"""Take stock of the disk for a sweep: every KV file, and every saved context with its refs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import structs

from mlxstack.core.errors import Conflict, Damaged, NotFound, Unreadable
from mlxstack.core.ports import Manifest
from mlxstack.store.history import AgentFolders, ManifestFile
from mlxstack.store.shelf import SlotFile, SlotShelf
from mlxstack.store.sweep import Context, Ref, Stock
from mlxstack.store.vault import DiskVault


def take_stock(
    vault: DiskVault,
    shelves: Iterable[SlotShelf],
    agents: AgentFolders,
    in_use: frozenset[Ref] = frozenset(),
    spared: frozenset[str] = frozenset(),
) -> Stock:
    """What lies there now. `shelves` must be all that share the vault.

    A KV file that only a forgotten shelf names would look unnamed. Damaged files are contexts
    that name nothing. Raises Conflict when one cannot be read now: it may name anything.
    """
    # The contexts last: one that is saved meanwhile names files that were listed before.
    blobs = tuple(vault.entries())
    try:
        contexts = (*(c for shelf in shelves for c in _slots(shelf)), *_agents(agents))
    except Unreadable as error:
        raise Conflict(f"nothing was deleted: {error.message}") from error
    return Stock(blobs, contexts, in_use, spared)


def _slots(shelf: SlotShelf) -> Iterator[Context]:
    for file in shelf.list():
        yield _context(f"slot file {file.name}", file, partial(shelf.peek, file.name))


def _agents(agents: AgentFolders) -> Iterator[Context]:
    for file in agents.manifests():
        peek = partial(agents.peek_manifest, file.agent, file.model)
        found = _context(f"agent {file.agent} ({file.model[:8]})", file, peek)
        yield structs.replace(found, agent=file.agent)


def _context(title: str, file: SlotFile | ManifestFile, peek: Callable[[], Manifest]) -> Context:
    return Context(title, file.path, file.n_bytes, file.used_at, _refs(title, peek))


def _refs(title: str, peek: Callable[[], Manifest]) -> frozenset[Ref]:
    try:
        manifest = peek()
    except Unreadable as error:
        raise Unreadable(f"{title}: {error.message}") from error
    except (Damaged, NotFound):
        return frozenset()
    keys = (*manifest.segments, *manifest.checkpoints)
    return frozenset((manifest.identity, key) for key in keys)
