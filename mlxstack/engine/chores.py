"""What people do with the KV memory: look at it, name a prefix, let go of it, clear it."""

import time
from typing import Any

from mlxstack.core.act import (
    Chore,
    Clear,
    Embed,
    Freed,
    LetGo,
    Locate,
    Look,
    Pin,
    PinAgent,
    PinKnown,
    Protect,
    Recall,
    Relieve,
    Unpin,
)
from mlxstack.core.errors import Unsupported
from mlxstack.core.frame import CacheView, PrefixView, Sums
from mlxstack.engine import agent_chores, pinning
from mlxstack.engine.ledger import Ledger
from mlxstack.engine.seating import Seating
from mlxstack.policy import audit
from mlxstack.policy.eviction import Pressure
from mlxstack.policy.meters import Tally
from mlxstack.policy.owners import Prefix
from mlxstack.policy.records import Place

MOST_AGENTS = 8
"""So many of those who share a prefix are named."""

NO_EMBEDDINGS = (
    "This server does not support embeddings; start an embedding preset beside it, "
    "such as `mlx-stack up demo-embedding`"
)


def do(chore: Chore, seating: Seating, ledger: Ledger) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match chore:
        case Look():
            return look(seating, ledger, chore.limit)
        case Locate() | PinAgent() | LetGo():
            return agent_chores.do(chore, seating)
        case Pin() | PinKnown() | Unpin() | Recall() | Protect():
            return pinning.do(chore, seating)
        case Embed():
            raise Unsupported(NO_EMBEDDINGS)
        case Clear():
            return Freed(seating.memory.make_room(0, Pressure.CRITICAL))
        case Relieve():
            return Freed(seating.memory.make_room(seating.live_bytes, Pressure(chore.level)))


def look(seating: Seating, ledger: Ledger, limit: int) -> CacheView:
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
        prefixes=tuple(_prefix(p, seating) for p in memory.owners.top(now, limit)),
    )


def _sums(tally: Tally) -> Sums:
    return Sums(
        n_requests=tally.n_requests,
        n_hits=tally.n_hits,
        n_prompt=tally.n_prompt,
        n_cached=tally.n_cached,
        saved_s=tally.saved_s,
        ttft_s=tally.ttft_s,
    )


def _prefix(prefix: Prefix, seating: Seating) -> PrefixView:
    known = seating.memory.owners.known(prefix.key)
    keys = known.keys if known else ()
    agents = seating.finding.sharing(keys)
    nodes = [node for key in keys if (node := seating.memory.index.nodes.get(key))]
    places = [p.value for p in Place if nodes and all(p in node.places for node in nodes)]
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
