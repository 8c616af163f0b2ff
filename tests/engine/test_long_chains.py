"""A context of so many segments that nothing may recurse over them."""

from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.policy.kv.prefix_index import SegmentMeta
from mlxstack.policy.kv.prefix_index_check import check_index
from mlxstack.policy.kv.retention import PinnedPrefixName


def test_a_chain_of_thousands_is_lost_at_once_though_it_is_pinned() -> None:
    memory = PrefixCache("id", PrefixCacheSpec(), 10**9)
    keys = [f"{n:05d}" for n in range(3000)]
    for n, key in enumerate(keys):
        parent = keys[n - 1] if n else None
        record = SegmentMeta(key, parent, 128 * n, 128 * (n + 1), 10, (key.encode(),))
        memory.on_disk(record, 0.0)
    memory.retention.pin(PinnedPrefixName("head", tuple(keys), 128 * 3000, 0.0))
    memory.invalidate(keys[1])
    assert list(memory.index.nodes) == keys[:1]
    check_index(memory.index)
