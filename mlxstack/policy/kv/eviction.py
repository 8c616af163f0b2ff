"""Eviction order of parked records: leaves first, so paths stay whole.

Order: states an agent has left behind, cold ones, shared heads. What is in use, being written or
pinned is never listed, nor is anything it needs.
"""

from collections import Counter
from collections.abc import Iterable
from enum import IntEnum
from heapq import heappop, heappush
from math import log2

from msgspec import Struct

from mlxstack.core.preset import EvictionPolicy
from mlxstack.policy.kv.prefix_index import IndexEntry, PrefixIndex, SegmentMeta, StorageTier

BOOST_S = 600.0
"""Seconds of recency that every doubling of hits is worth."""


class MemoryPressure(IntEnum):
    """Memory pressure: CALM frees on demand, HIGH cold KV, CRITICAL shared prefixes."""

    CALM = 0
    HIGH = 1
    CRITICAL = 2


class EvictionClass(IntEnum):
    """Classes of records, the first to go first."""

    SUPERSEDED = 0
    COLD = 1
    SHARED = 2


DROPPED = {
    MemoryPressure.CALM: 0,
    MemoryPressure.HIGH: EvictionClass.SHARED,
    MemoryPressure.CRITICAL: EvictionClass.SHARED + 1,
}
"""Ranks below this go under pressure, even if no bytes are needed."""


class EvictionCandidate(Struct, frozen=True):
    """Eviction candidate; the entry `needs` must outlive it.

    `is_entry` counts towards `max_entries`; `is_fixed` may not go now.
    """

    key: str
    n_bytes: int
    needs: str | None = None
    hits: int = 0
    used_at: float = 0.0
    rank: EvictionClass = EvictionClass.COLD
    is_fixed: bool = False
    is_entry: bool = True


class EvictionGoal(Struct, frozen=True):
    """Goal of an eviction: `n_bytes` freed, and at most `max_entries` left."""

    n_bytes: int = 0
    max_entries: int | None = None
    policy: EvictionPolicy = EvictionPolicy.LRU_FREQUENCY
    pressure: MemoryPressure = MemoryPressure.CALM


def entries(index: PrefixIndex) -> tuple[EvictionCandidate, ...]:
    """Eviction candidates in memory; parents of records elsewhere are fixed."""
    return tuple(
        EvictionCandidate(
            key=key,
            n_bytes=node.record.n_bytes,
            needs=node.record.parent,
            hits=node.hits,
            used_at=node.used_at,
            rank=_rank(node),
            is_fixed=_is_fixed(index, node),
            is_entry=isinstance(node.record, SegmentMeta),
        )
        for key, node in index.nodes.items()
        if StorageTier.MEMORY in node.tiers
    )


def plan(entries: Iterable[EvictionCandidate], goal: EvictionGoal) -> tuple[str, ...]:
    """Keys to evict in order; fewer if not evictable. O(n log n).

    Request some more bytes than needed at once, rather than a few at every step.
    """
    leaves = _Leaves(entries, goal.policy)
    n_bytes = goal.n_bytes
    n_excess = 0
    if goal.max_entries is not None:
        n_excess = leaves.n_entries - goal.max_entries
    chosen: list[str] = []
    while (entry := leaves.first()) is not None:
        if n_bytes <= 0 and n_excess <= 0 and entry.rank >= DROPPED[goal.pressure]:
            break
        leaves.take(entry)
        n_bytes -= entry.n_bytes
        n_excess -= entry.is_entry
        chosen.append(entry.key)
    return tuple(chosen)


class _Leaves:
    """Leaf entries by eviction order; taking one may expose its parent."""

    def __init__(self, entries: Iterable[EvictionCandidate], policy: EvictionPolicy) -> None:
        self._known = {entry.key: entry for entry in entries}
        self._policy = policy
        self._needed = Counter(entry.needs for entry in self._known.values())
        self._heap: list[tuple[int, float, str]] = []
        self.n_entries = sum(entry.is_entry for entry in self._known.values())
        for entry in self._known.values():
            self._offer(entry)

    def first(self) -> EvictionCandidate | None:
        """The next to go, or None."""
        if self._heap:
            return self._known[self._heap[0][2]]
        return None

    def take(self, entry: EvictionCandidate) -> None:
        """`entry`, the first, goes; what it needed may follow."""
        heappop(self._heap)
        self._needed[entry.needs] -= 1
        if entry.needs in self._known:
            self._offer(self._known[entry.needs])

    def _offer(self, entry: EvictionCandidate) -> None:
        if not (self._needed[entry.key] or entry.is_fixed):
            heappush(self._heap, (*_order(entry, self._policy), entry.key))


def _order(entry: EvictionCandidate, policy: EvictionPolicy) -> tuple[int, float]:
    """Sort key: the rank, then the last use, extended by hits."""
    used_at = entry.used_at
    if policy is EvictionPolicy.LRU_FREQUENCY:
        used_at += BOOST_S * log2(1 + entry.hits)
    return int(entry.rank), used_at


def _rank(node: IndexEntry) -> EvictionClass:
    if node.is_shared:
        return EvictionClass.SHARED
    if node.is_superseded:
        return EvictionClass.SUPERSEDED
    return EvictionClass.COLD


def _is_fixed(index: PrefixIndex, node: IndexEntry) -> bool:
    if node.refs or node.is_writing or node.pins:
        return True
    children = (index.nodes[child] for child in node.children)
    return len(node.tiers) == 1 and any(StorageTier.MEMORY not in child.tiers for child in children)
