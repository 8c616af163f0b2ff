"""The index of the KV memory: which prefixes are known, where they lie, and who uses them.

Segments form a tree. A path covers its tokens without a gap: every child starts inside its
parent, and a parent stays as long as it has children. So a known block key implies that all
blocks before it are known, which makes the longest match a binary search (`matching`).

One owner, no clock: `now` is an argument, in seconds.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from mlxstack.policy.kv_records import CheckpointMeta, IndexEntry, Record, StorageTier, check_fit

MAX_FORGOTTEN = 16_384
"""Block keys of evicted segments that are remembered, to explain misses."""


class PrefixIndex:
    """All records and their nodes. Changed by one thread only."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[str, IndexEntry] = {}
        self._blocks: dict[bytes, dict[str, None]] = {}
        self._states: dict[bytes, str] = {}
        self._forgotten: dict[bytes, None] = {}
        self.n_evicted = 0
        self.memory_bytes = 0

    @property
    def nodes(self) -> Mapping[str, IndexEntry]:
        """All nodes by key, to look at."""
        return MappingProxyType(self._nodes)

    @property
    def blocks(self) -> Mapping[bytes, Mapping[str, None]]:
        """The segments that hold the last token of each known block, to look at."""
        return MappingProxyType(self._blocks)

    @property
    def states(self) -> Mapping[bytes, str]:
        """Checkpoint keys by the name of their tokens, to look at."""
        return MappingProxyType(self._states)

    @property
    def forgotten(self) -> Mapping[bytes, None]:
        """The last block keys that were evicted, to look at."""
        return MappingProxyType(self._forgotten)

    def insert(self, record: Record, place: StorageTier, now: float) -> bool:
        """Add a record, or a place to a known one; False when nothing was new. O(blocks).

        A known checkpoint keeps its first parent.
        """
        node = self._nodes.get(record.key)
        if node is not None and place in node.tiers:
            return False
        if node is None:
            node = self._add(record, now)
        node.tiers.add(place)
        self._count(record, place, 1)
        return True

    def lock(self, keys: Iterable[str]) -> None:
        """Keep these records while they are in use; every lock needs its unlock."""
        for key in keys:
            self._nodes[key].refs += 1

    def unlock(self, keys: Iterable[str]) -> None:
        """The opposite of `lock`."""
        for key in keys:
            node = self._nodes[key]
            assert node.refs > 0, f"{key} is not locked"
            node.refs -= 1

    def touch(self, keys: Iterable[str], now: float) -> None:
        """These records were hit."""
        for key in keys:
            node = self._nodes[key]
            node.hits += 1
            node.used_at = now
            node.was_left = False

    def set_writing(self, key: str, is_writing: bool) -> None:
        """Whether the writer holds the bytes; until it is done they stay in memory."""
        self._nodes[key].is_writing = is_writing

    def can_drop(self, key: str, place: StorageTier) -> bool:
        """Whether `place` may give up this record: unused, and nothing left that needs it."""
        node = self._nodes[key]
        if place not in node.tiers or node.refs or node.is_writing:
            return False
        if len(node.tiers) == 1:
            return not (node.children or node.pins)
        return place is StorageTier.DISK or not node.pins

    def drop(self, key: str, place: StorageTier) -> None:
        """Forget the bytes in `place`, and the record with its last place. O(blocks)."""
        assert self.can_drop(key, place), f"{key} cannot leave {place}"
        node = self._nodes[key]
        node.tiers.discard(place)
        self._count(node.record, place, -1)
        self.n_evicted += 1
        if not node.tiers:
            self._remove(node.record)

    def _add(self, record: Record, now: float) -> IndexEntry:
        parent = None if record.parent is None else self._nodes[record.parent]
        check_fit(record, parent.record if parent else None, self.block_size)
        node = IndexEntry(record=record, tiers=set(), born_at=now, used_at=now)
        self._nodes[record.key] = node
        if parent is not None:
            parent.children.add(record.key)
        if isinstance(record, CheckpointMeta):
            self._states[record.state] = record.key
            return node
        for block in record.blocks:
            self._blocks.setdefault(block, {})[record.key] = None
            self._forgotten.pop(block, None)
        return node

    def _count(self, record: Record, place: StorageTier, sign: int) -> None:
        if place is StorageTier.MEMORY:
            self.memory_bytes += sign * record.n_bytes

    def _remove(self, record: Record) -> None:
        del self._nodes[record.key]
        if record.parent is not None:
            self._nodes[record.parent].children.discard(record.key)
        if isinstance(record, CheckpointMeta):
            del self._states[record.state]
            return
        for block in record.blocks:
            del self._blocks[block][record.key]
            if not self._blocks[block]:
                del self._blocks[block]
                self._forgotten[block] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
