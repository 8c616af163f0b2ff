"""What people do with the KV memory: look at it, name a prefix, let go of it, clear it."""

import time
from typing import Any

from mlxstack.core.act import (
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
from mlxstack.core.frame import CacheView, PrefixView, WindowSums
from mlxstack.engine import agent_chores, pinning
from mlxstack.engine.ledger import EngineStats
from mlxstack.engine.seating import SlotKVManager
from mlxstack.policy import audit
from mlxstack.policy.eviction import MemoryPressure
from mlxstack.policy.meters import RequestSums
from mlxstack.policy.owners import PrefixStats
from mlxstack.policy.records import Tier

MOST_AGENTS = 8
"""So many of those who share a prefix are named."""

NO_EMBEDDINGS = (
    "This server does not support embeddings; start an embedding preset beside it, "
    "such as `mlx-stack up demo-embedding`"
)


def do(chore: CacheCommand, seating: SlotKVManager, ledger: EngineStats) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match chore:
        case GetCacheStats():
            return look(seating, ledger, chore.limit)
        case LocateAgentKV() | PinAgent() | ReleaseAgentKV():
            return agent_chores.do(chore, seating)
        case PinPrefix() | PinKnownPrefix() | UnpinPrefix() | ListSharedPrefixes() | RetainPrefix():
            return pinning.do(chore, seating)
        case EmbedTexts():
            raise Unsupported(NO_EMBEDDINGS)
        case ClearCache():
            return FreedBytes(seating.memory.make_room(0, MemoryPressure.CRITICAL))
        case ReclaimMemory():
            return FreedBytes(
                seating.memory.make_room(seating.live_bytes, MemoryPressure(chore.level))
            )


def look(seating: SlotKVManager, ledger: EngineStats, limit: int) -> CacheView:
    """The KV memory as people see it. Live contexts count as memory, like parked ones."""
    memory = seating.memory
    now = time.monotonic()
    totals = audit.totals(memory.index)
    rates = ledger.meters.rates(now)
    return CacheView(
        is_enabled=memory.spec.enabled,
        memory_bytes=seating.live_bytes + totals.memory,
        memory_budget=memory.budget,
        disk_bytes=totals.disk,
        disk_budget=memory.spec.disk.max_bytes,
        n_entries=totals.n_entries,
        max_entries=memory.spec.max_entries,
        n_evicted=memory.index.n_evicted,
        minute=_sums(rates.minute),
        hour=_sums(rates.hour),
        whole=_sums(rates.whole),
        prefixes=tuple(_prefix(p, seating) for p in memory.retention.top(now, limit)),
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


def _prefix(prefix: PrefixStats, seating: SlotKVManager) -> PrefixView:
    known = seating.memory.retention.known(prefix.key)
    keys = known.keys if known else ()
    agents = seating.lookup.sharing(keys)
    nodes = [node for key in keys if (node := seating.memory.index.nodes.get(key))]
    places = [p.value for p in Tier if nodes and all(p in node.tiers for node in nodes)]
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
