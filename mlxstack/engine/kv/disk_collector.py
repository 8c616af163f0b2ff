"""Makes room on the disk before something is written, and forgets what had to go for it."""

from collections.abc import Sequence
from concurrent.futures import Future

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.ports import CallSoon, KVStore
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.store.background_writer import BackgroundWriter


class DiskCollector:
    """Belongs to the MLX thread; the disk is touched by the writer. `post` runs there, soon."""

    def __init__(
        self,
        memory: PrefixCache,
        store: KVStore,
        identity: str,
        writer: BackgroundWriter,
        post: CallSoon,
    ) -> None:
        self._memory = memory
        self._store = store
        self._identity = identity
        self._writer = writer
        self._post = post

    def make_room(self, keys: Sequence[str]) -> "Future[GCResult]":
        """Room for those of these that are still known. Raises Busy; the future DiskFull."""
        nodes = self._memory.index.nodes
        known = [key for key in keys if key in nodes]
        n_bytes = sum(nodes[key].record.n_bytes for key in known)
        in_use = self._in_use(known)
        return self._forgetting(self._writer.submit(lambda: self._store.make_room(n_bytes, in_use)))

    def collect(self, wanted: CollectGarbage) -> "Future[GCResult]":
        """Delete what the bounds do not allow. Raises Busy; the future what the vault raises."""
        in_use = self._in_use(())
        return self._forgetting(self._writer.submit(lambda: self._store.sweep(wanted, in_use)))

    def _in_use(self, keys: Sequence[str]) -> frozenset[tuple[str, str]]:
        """What is read or written now, or pinned, and what that or `keys` continue: none may go."""
        nodes = self._memory.index.nodes
        busy = [k for k, node in nodes.items() if node.refs or node.is_writing or node.pins]
        found: set[str] = set()
        for key in (*keys, *busy):
            above: str | None = key
            while above is not None and above not in found:
                found.add(above)
                above = nodes[above].record.parent
        return frozenset((self._identity, key) for key in found)

    def _forgetting(self, sweeping: "Future[GCResult]") -> "Future[GCResult]":
        sweeping.add_done_callback(lambda done: self._post(lambda: self._forget(done)))
        return sweeping

    def _forget(self, done: "Future[GCResult]") -> None:
        if done.cancelled() or done.exception() is not None or done.result().is_dry:
            return
        for victim in done.result().victims:
            if victim.ref is not None and victim.ref[0] == self._identity:
                self._memory.invalidate(victim.ref[1])
