"""What people do with the KV memory: look at it, name a prefix, let go of it, clear it."""

import time
from typing import Any

from mlxstack.core.commands import (
    CacheCommand,
    ClearCache,
    EmbedTexts,
    FreedBytes,
    GetCacheStats,
    ListSharedPrefixes,
    LocateAgentKV,
    PinAgent,
    PinKnownPrefix,
    PinPrefix,
    ReclaimMemory,
    ReleaseAgentKV,
    RetainPrefix,
    UnpinPrefix,
)
from mlxstack.core.errors import Unsupported
from mlxstack.core.status import CacheView, PrefixView, WindowSums
from mlxstack.engine import agent_admin, prefix_admin
from mlxstack.engine.kv.slot_preparation import SlotKVManager
from mlxstack.engine.stats import EngineStats
from mlxstack.policy import prefix_index_check
from mlxstack.policy.cache_stats import RequestSums
from mlxstack.policy.eviction import MemoryPressure
from mlxstack.policy.kv_records import StorageTier
from mlxstack.policy.retention import PrefixStats

MOST_AGENTS = 8
"""So many of those who share a prefix are named."""

NO_EMBEDDINGS = (
    "This server does not support embeddings; start an embedding preset beside it, "
    "such as `mlx-stack up demo-embedding`"
)


def do(command: CacheCommand, slot_kv: SlotKVManager, ledger: EngineStats) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match command:
        case GetCacheStats():
            return look(slot_kv, ledger, command.limit)
        case LocateAgentKV() | PinAgent() | ReleaseAgentKV():
            return agent_admin.do(command, slot_kv)
        case PinPrefix() | PinKnownPrefix() | UnpinPrefix() | ListSharedPrefixes() | RetainPrefix():
            return prefix_admin.do(command, slot_kv)
        case EmbedTexts():
            raise Unsupported(NO_EMBEDDINGS)
        case ClearCache():
            return FreedBytes(slot_kv.memory.make_room(0, MemoryPressure.CRITICAL))
        case ReclaimMemory():
            return FreedBytes(
                slot_kv.memory.make_room(slot_kv.live_bytes, MemoryPressure(command.level))
            )


def look(slot_kv: SlotKVManager, ledger: EngineStats, limit: int) -> CacheView:
    """The KV memory as people see it. Live contexts count as memory, like parked ones."""
    memory = slot_kv.memory
    now = time.monotonic()
    totals = prefix_index_check.totals(memory.index)
    rates = ledger.meters.rates(now)
    return CacheView(
        is_enabled=memory.spec.enabled,
        memory_bytes=slot_kv.live_bytes + totals.memory,
        memory_budget=memory.budget,
        disk_bytes=totals.disk,
        disk_budget=memory.spec.disk.max_bytes,
        n_entries=totals.n_entries,
        max_entries=memory.spec.max_entries,
        n_evicted=memory.index.n_evicted,
        minute=_sums(rates.minute),
        hour=_sums(rates.hour),
        whole=_sums(rates.whole),
        prefixes=tuple(_prefix(p, slot_kv) for p in memory.retention.top(now, limit)),
    )


def _sums(tally: RequestSums) -> WindowSums:
    return WindowSums(
        n_requests=tally.n_requests,
        n_hits=tally.n_hits,
        n_prompt=tally.n_prompt,
        n_cached=tally.n_cached,
        saved_s=tally.saved_s,
        ttft_s=tally.ttft_s,
    )


def _prefix(prefix: PrefixStats, slot_kv: SlotKVManager) -> PrefixView:
    known = slot_kv.memory.retention.known(prefix.key)
    keys = known.keys if known else ()
    agents = slot_kv.lookup.sharing(keys)
    nodes = [node for key in keys if (node := slot_kv.memory.index.nodes.get(key))]
    places = [p.value for p in StorageTier if nodes and all(p in node.tiers for node in nodes)]
    return PrefixView(
        id=prefix.key,
        name=prefix.name,
        n_tokens=prefix.n_tokens,
        n_bytes=prefix.n_bytes,
        n_hits=prefix.hits,
        age_s=prefix.age_s,
        agents=agents[:MOST_AGENTS],
        places=tuple(places),
        is_pinned=prefix.is_pinned,
    )
