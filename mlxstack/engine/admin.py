"""Prefix-cache administration: statistics, pins, release of an agent's KV, memory reclaim."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from msgspec.structs import replace

from mlxstack.core.commands import AgentKVLocation, FreedBytes, PinnedPrefix, pin_of
from mlxstack.core.errors import NotFound
from mlxstack.core.preset import AUTO
from mlxstack.core.prompt_tokens import PromptTokens, TokenRow
from mlxstack.core.status import CacheView, PrefixView
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.engine.stats import EngineStats
from mlxstack.policy.kv import prefix_index_check
from mlxstack.policy.kv.eviction import MemoryPressure
from mlxstack.policy.kv.prefix_index import StorageTier
from mlxstack.policy.kv.retention import PinnedPrefixName

MAX_AGENTS = 8
"""Agents named per shared prefix."""
MAX_HEAD = 96
"""Tokens of a prefix that are decoded to its first words."""

T = TypeVar("T")


class RunBetweenSteps(Protocol):
    """Run `work` on the MLX thread between two steps; returns a future.

    The future gets its result or error.
    """

    def __call__(self, work: Callable[[EngineLoop], T]) -> Future[T]: ...


class PrefixCacheAdmin:
    """Typed calls on the prefix cache of one engine. Thread-safe."""

    def __init__(self, run: RunBetweenSteps) -> None:
        self._run = run

    def stats(self, limit: int = 20) -> Future[CacheView]:
        """Cache statistics with at most `limit` prefixes; live contexts count as memory."""
        return self._run(lambda loop: _view(loop.slot_kv, loop.stats, limit))

    def limit(self, n_bytes: int) -> Future[None]:
        """Bound KV to so many bytes of what the load planned."""
        return self._run(lambda loop: loop.limit_kv(n_bytes))

    def locate_agents(self, agents: tuple[str, ...]) -> Future[tuple[AgentKVLocation, ...]]:
        """Locate the KV of each agent's last prompt beside the slots."""
        return self._run(lambda loop: tuple(loop.slot_kv.lookup.locate(agent) for agent in agents))

    def pin(self, name: str, prompt: PromptTokens, salt: str = "") -> Future[PinnedPrefix]:
        """Pin the longest known part of these tokens under `name`."""
        return self._run(lambda loop: _pin(loop.slot_kv, name, prompt, salt))

    def pin_known(self, name: str, prefix_id: str) -> Future[PinnedPrefix]:
        """Pin the prefix with this id in `CacheView`; may raise NotFound."""
        return self._run(lambda loop: _pin_known(loop.slot_kv, name, prefix_id))

    def pin_agent(self, agent: str) -> Future[PinnedPrefix]:
        """Pin the longest known part of an agent's last prompt.

        The name is that of `pin_of`.
        """
        return self._run(lambda loop: _pin_agent(loop.slot_kv, agent))

    def unpin(self, name: str) -> Future[None]:
        """Release a named prefix. The future raises NotFound."""
        return self._run(lambda loop: _unpin(loop.slot_kv, name))

    def release_agent(self, agent: str, *, is_kept: bool) -> Future[FreedBytes]:
        """Release an agent's claim on KV; free what no other claims.

        With `is_kept`, KV that is not on disk stays in memory.
        """
        return self._run(lambda loop: FreedBytes(_release_agent(loop.slot_kv, agent, is_kept)))

    def shared_prefixes(self) -> Future[tuple[PromptTokens, ...]]:
        """List the prefixes that several conversations share, also from before a restart."""
        return self._run(
            lambda loop: tuple(PromptTokens(prefix.tokens) for prefix in loop.slot_kv.learned)
        )

    def retain(self, prompt: PromptTokens) -> Future[None]:
        """Park the known part of a shared prefix; protect it from eviction."""
        return self._run(lambda loop: _park_nearest(loop.slot_kv, prompt, ""))

    def clear(self) -> Future[FreedBytes]:
        """Evict parked KV from memory, neither in use nor pinned."""
        return self._run(
            lambda loop: FreedBytes(loop.slot_kv.prefix_cache.make_room(0, MemoryPressure.CRITICAL))
        )

    def reclaim(self, level: int) -> Future[FreedBytes]:
        """Reclaim memory: level 1 evicts cold parked KV, 2 all unused."""
        return self._run(lambda loop: reclaim(loop, MemoryPressure(level)))


def reclaim(loop: EngineLoop, pressure: MemoryPressure) -> FreedBytes:
    """Evict by pressure and end idle work, on the MLX thread."""
    if pressure is not MemoryPressure.CALM:
        loop.end_idle_work()
        loop.slot_kv.drop_copies()
    freed = FreedBytes(loop.slot_kv.prefix_cache.make_room(loop.slot_kv.live_bytes, pressure))
    loop.release_buffers()
    return freed


def _pin(slot_kv: SlotKVManager, name: str, row: TokenRow, salt: str) -> PinnedPrefix:
    """Pin tokens; a live context that begins with them is parked first."""
    _park_nearest(slot_kv, row, salt)
    plan = slot_kv.lookup.kept(row, salt, slot_kv.slots[0])
    return _add_pin(slot_kv, PinnedPrefixName(name, plan.keys, plan.position, time.monotonic()))


def _pin_known(slot_kv: SlotKVManager, name: str, prefix_id: str) -> PinnedPrefix:
    prefix = slot_kv.prefix_cache.retention.known(prefix_id)
    if prefix is None:
        raise NotFound(f"no prefix has the id {prefix_id}; it may have been evicted")
    return _add_pin(slot_kv, PinnedPrefixName(name, prefix.keys, prefix.n_tokens, time.monotonic()))


def _pin_agent(slot_kv: SlotKVManager, agent: str) -> PinnedPrefix:
    last = slot_kv.lookup.last(agent)
    if last is None:
        return PinnedPrefix(pin_of(agent), 0, 0)
    return _pin(slot_kv, pin_of(agent), last, last.salt)


def _add_pin(slot_kv: SlotKVManager, name: PinnedPrefixName) -> PinnedPrefix:
    slot_kv.prefix_cache.retention.pin(name)
    nodes = slot_kv.prefix_cache.index.nodes
    n_bytes = sum(nodes[key].record.n_bytes for key in name.keys if key in nodes)
    return PinnedPrefix(name.name, name.n_tokens, n_bytes)


def _unpin(slot_kv: SlotKVManager, name: str) -> None:
    if not slot_kv.prefix_cache.retention.unpin(name):
        raise NotFound(f"no prefix is called {name}")


def _release_agent(slot_kv: SlotKVManager, agent: str, is_kept: bool) -> int:
    """Bytes that left memory."""
    prefix_cache = slot_kv.prefix_cache
    keys = slot_kv.lookup.keys_of(agent)
    prefix_cache.retention.release(agent)
    if is_kept:
        return prefix_cache.release([key for key in keys if prefix_cache.is_on_disk(key)])
    slot_kv.lookup.forget(agent)
    return prefix_cache.release(keys)


def _park_nearest(slot_kv: SlotKVManager, row: TokenRow, salt: str) -> None:
    """Park the live context with the longest common prefix, if any."""
    n_common, nearest = slot_kv.nearest(row, salt)
    if nearest is not None and n_common:
        slot_kv.park(nearest)


def _view(slot_kv: SlotKVManager, stats: EngineStats, limit: int) -> CacheView:
    prefix_cache = slot_kv.prefix_cache
    now = time.monotonic()
    rates = stats.meters.rates(now)
    disk_budget = prefix_cache.spec.disk.max_bytes
    return CacheView(
        is_enabled=prefix_cache.spec.enabled,
        memory_bytes=slot_kv.live_bytes + prefix_cache.n_bytes,
        memory_budget=prefix_cache.budget,
        disk_bytes=prefix_index_check.bytes_in(prefix_cache.index, StorageTier.DISK),
        disk_budget=None if disk_budget == AUTO else disk_budget,
        n_entries=prefix_index_check.n_entries(prefix_cache.index),
        max_entries=prefix_cache.spec.max_entries,
        n_evicted=prefix_cache.index.n_evicted,
        minute=rates["minute"],
        hour=rates["hour"],
        whole=rates["whole"],
        prefixes=tuple(_prefix(p, slot_kv) for p in prefix_cache.retention.top(now, limit)),
    )


def _prefix(prefix: PrefixView, slot_kv: SlotKVManager) -> PrefixView:
    """Add the agents that share a prefix, and its tiers."""
    record = slot_kv.prefix_cache.retention.known(prefix.id)
    keys = record.keys if record else ()
    agents = slot_kv.lookup.sharing(keys)
    nodes = [node for key in keys if (node := slot_kv.prefix_cache.index.nodes.get(key))]
    places = tuple(p.value for p in StorageTier if nodes and all(p in node.tiers for node in nodes))
    head = slot_kv.lookup.beginning(keys)[:MAX_HEAD]
    return replace(prefix, agents=agents[:MAX_AGENTS], places=places, head=head)
