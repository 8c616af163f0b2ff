"""Statistics and invariants of the prefix cache, checked when idle."""

from mlxstack.policy.kv.prefix_index import (
    CheckpointMeta,
    IndexEntry,
    PrefixIndex,
    SegmentMeta,
    StorageTier,
    check_fit,
)
from mlxstack.policy.kv.retention import Retention


def bytes_in(index: PrefixIndex, tier: StorageTier) -> int:
    """Bytes in one tier. O(records); `index.memory_bytes` is always at hand."""
    return sum(node.record.n_bytes for node in index.nodes.values() if tier in node.tiers)


def n_entries(index: PrefixIndex) -> int:
    """Number of segments in memory. O(records)."""
    parked = (node for node in index.nodes.values() if StorageTier.MEMORY in node.tiers)
    return sum(isinstance(node.record, SegmentMeta) for node in parked)


def check_index(index: PrefixIndex, retention: Retention | None = None) -> None:
    """Assert all invariants of index and retention. O(records + blocks)."""
    for key, node in index.nodes.items():
        _check_node(index, key, node)
    n_blocks = 0
    for block, keys in index.blocks.items():
        n_blocks += len(keys)
        assert keys, "a block has no key"
        assert block not in index.forgotten, "a known block counts as forgotten"
    records = [node.record for node in index.nodes.values()]
    assert n_blocks == sum(len(r.blocks) for r in records if isinstance(r, SegmentMeta))
    assert len(index.states) == sum(isinstance(r, CheckpointMeta) for r in records)
    n_bytes = bytes_in(index, StorageTier.MEMORY)
    assert index.memory_bytes == n_bytes, "the bytes in memory do not add up"
    if retention is not None:
        _check_owners(index, retention)


def _check_node(index: PrefixIndex, key: str, node: IndexEntry) -> None:
    record = node.record
    assert record.key == key
    assert node.tiers, f"{key} lies nowhere"
    assert node.refs >= 0, f"{key} was let go of too often"
    parent = None
    if record.parent is not None:
        assert record.parent in index.nodes, f"{key} lost its parent"
        assert key in index.nodes[record.parent].children, f"{key} is unknown to its parent"
        parent = index.nodes[record.parent].record
    check_fit(record, parent, index.block_size)
    for child in node.children:
        assert child in index.nodes, f"{key} has a child that is gone"
        assert index.nodes[child].record.parent == key, f"{child} belongs to another"
    if isinstance(record, CheckpointMeta):
        assert index.states[record.state] == key, f"{key} cannot be found"
        assert not node.children, f"{key} has children"
    else:
        assert all(key in index.blocks[block] for block in record.blocks), f"{key} is hidden"


def _check_owners(index: PrefixIndex, retention: Retention) -> None:
    claimed: dict[str, set[str]] = {}
    for agent, keys in retention.claims:
        for key in keys:
            claimed.setdefault(key, set()).add(agent)
    for name in retention.names.values():
        for key in name.keys:
            claimed.setdefault(key, set()).add(name.name)
    for key, node in index.nodes.items():
        holders = node.agents | node.pins | node.soft_pins
        assert holders <= claimed.get(key, set()), f"{key} is held by a stranger"
