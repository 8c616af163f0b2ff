"""What people do with the KV memory: look at it, name a prefix, let go of it, clear it."""

import time
from typing import Any

import mlx.core as mx

from mlxstack.core.act import Chore, Clear, Freed, Locate, Look, Pin, Pinned, Relieve, Unpin
from mlxstack.core.errors import NotFound
from mlxstack.core.frame import CacheView, PrefixView, Sums
from mlxstack.engine.ledger import Ledger
from mlxstack.engine.seating import Seating
from mlxstack.policy import audit
from mlxstack.policy.eviction import Pressure
from mlxstack.policy.meters import Tally
from mlxstack.policy.owners import Name, Prefix
from mlxstack.policy.prefix import common_prefix


def do(chore: Chore, seating: Seating, ledger: Ledger) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match chore:
        case Look():
            return look(seating, ledger, chore.limit)
        case Locate():
            return tuple(seating.locate(agent) for agent in chore.agents)
        case Pin():
            return _pin(seating, chore)
        case Unpin():
            if not seating.memory.owners.unpin(chore.name):
                raise NotFound(f"no prefix is called {chore.name}")
            return None
        case Clear():
            return Freed(seating.memory.make_room(0, Pressure.CRITICAL))
        case Relieve():
            freed = seating.memory.make_room(seating.live_bytes, Pressure(chore.level))
            mx.clear_cache()
            return Freed(freed)


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
        prefixes=tuple(_prefix(p) for p in memory.owners.top(now, limit)),
    )


def _pin(seating: Seating, pin: Pin) -> Pinned:
    """A live context that begins with the tokens is parked first, so that there is something."""
    memory = seating.memory
    live = [c for c in seating.slots if c.salt == pin.salt and len(c)]
    nearest = max(live, key=lambda c: common_prefix(c.tokens, pin.tokens), default=None)
    if nearest is not None and common_prefix(nearest.tokens, pin.tokens):
        seating.park(nearest)
    path = memory.path_of(pin.tokens, pin.salt)
    n_tokens = path[-1].upto if path else 0
    keys = tuple(step.key for step in path)
    memory.owners.pin(Name(pin.name, keys, n_tokens, time.monotonic()))
    return Pinned(pin.name, n_tokens, sum(step.n_bytes for step in path))


def _sums(tally: Tally) -> Sums:
    return Sums(
        n_requests=tally.n_requests,
        n_hits=tally.n_hits,
        n_prompt=tally.n_prompt,
        n_cached=tally.n_cached,
        saved_s=tally.saved_s,
        ttft_s=tally.ttft_s,
    )


def _prefix(prefix: Prefix) -> PrefixView:
    return PrefixView(
        id=prefix.name,
        name=prefix.name,
        n_tokens=prefix.n_tokens,
        n_bytes=prefix.n_bytes,
        n_hits=prefix.hits,
        age_s=prefix.age_s,
        is_pinned=prefix.is_pinned,
    )
