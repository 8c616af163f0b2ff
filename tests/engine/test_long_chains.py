"""Chains of segments that are lost: long ones, and those that are being written."""

from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.policy.kv.prefix_index import SegmentMeta
from mlxstack.policy.kv.prefix_index_check import check_index
from mlxstack.policy.kv.retention import PinnedPrefixName


def chain(n_segments: int) -> tuple[PrefixCache, list[str]]:
    """An index of segments on disk, each of which continues the one before, and their keys."""
    cache = PrefixCache("id", PrefixCacheSpec(), 10**9)
    keys = [f"{n:05d}" for n in range(n_segments)]
    for n, key in enumerate(keys):
        parent = keys[n - 1] if n else None
        record = SegmentMeta(key, parent, 128 * n, 128 * (n + 1), 10, (key.encode(),))
        cache.on_disk(record, 0.0)
    return cache, keys


def test_a_chain_of_thousands_is_lost_at_once_though_it_is_pinned() -> None:
    """Nothing may recurse over its segments."""
    cache, keys = chain(3000)
    cache.retention.pin(PinnedPrefixName("head", tuple(keys), 128 * 3000, 0.0))
    cache.invalidate(keys[1])
    assert list(cache.index.nodes) == keys[:1]
    check_index(cache.index)


def test_a_lost_segment_goes_though_what_continues_it_is_being_written() -> None:
    """It would be taken for one on disk until the write is over, and no slot be saved."""
    cache, keys = chain(3)
    cache.index.set_writing(keys[2], True)
    cache.invalidate(keys[1])
    assert list(cache.index.nodes) == keys[:1]
    check_index(cache.index)
