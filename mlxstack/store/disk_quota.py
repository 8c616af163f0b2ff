"""Disk quota: KV store that collects garbage before exceeding its bounds."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from mlxstack.core.commands import CollectGarbage, GCResult, GCScope
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import DiskSpec
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.gc import (
    DiskInventory,
    GCRules,
    Ref,
    carry_out,
    check_room,
    of_agent,
    plan,
    scan_disk,
)
from mlxstack.store.kv_store import DiskKVStore

GRACE_S = 60.0
"""Grace in seconds for files that another process may save."""

SAVING_S = 10.0
"""Grace in seconds while a save of this process waits."""

Clock = Callable[[], float]


def steady_s() -> float:
    """Seconds that no setting of the clock changes, with those of sleep."""
    # On a Mac the monotonic clock counts sleep, and Linux has another one for that.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class QuotaKVStore:
    """A `core.interfaces.KVStore` over `store`, shared by slot files and `agents`.

    `clock` returns Unix seconds, `steady` seconds since any moment. What the clock jumped forwards
    since the start makes no file older.
    """

    def __init__(
        self,
        store: DiskKVStore,
        agents: AgentFolders,
        spec: DiskSpec,
        clock: Clock = time.time,
        steady: Clock = steady_s,
    ) -> None:
        self._store = store
        self._agents = agents
        self._spec = spec
        self._clock = clock
        self._steady = steady
        self._offset_s = clock() - steady()
        self._n_bytes: int | None = None
        self.root = store.root
        self.headers = store.headers
        self.has = store.has
        self.write = store.write
        self.flush = store.flush
        self.read = store.read
        self.head = store.head
        self.read_into = store.read_into
        self.note = store.note
        self.noted = store.noted

    def make_room(self, n_bytes: int, in_use: frozenset[Ref]) -> GCResult:
        """Free `n_bytes` under `max_bytes`, or delete nothing.

        Raises DiskFull. The files are counted only when the room seems to be short.
        """
        self._store.make_room(n_bytes, in_use)
        limit = self._spec.max_bytes
        if limit is None or (self._n_bytes is not None and self._n_bytes + n_bytes <= limit):
            self._n_bytes = None if limit is None else (self._n_bytes or 0) + n_bytes
            return GCResult()
        now = self._clock()
        gc_plan = plan(
            self._scan(in_use, GCScope.ALL), GCRules(limit, None, n_bytes, SAVING_S), now
        )
        check_room(gc_plan)
        swept = carry_out(gc_plan, self._store.disk)
        self._n_bytes = swept.n_after + n_bytes
        return swept

    def sweep(self, command: CollectGarbage, in_use: frozenset[Ref]) -> GCResult:
        """Delete by age and bytes; unset bounds are the preset's.

        Raises BadRequest when there is no bound at all, Conflict when a slot folder is missing.
        """
        rules = GCRules(command.max_bytes, command.max_age_s, grace_s=GRACE_S)
        if command.max_bytes is None and command.max_age_s is None and command.agent is None:
            rules = GCRules(self._spec.max_bytes, self._spec.max_age_s, grace_s=GRACE_S)
        if rules.max_bytes is None and rules.max_age_s is None:
            raise BadRequest(
                "nothing bounds the disk; give --max-bytes or --older-than, "
                "or prefix_cache.disk.max_bytes in the preset"
            )
        now = self._clock()
        if rules.max_age_s is not None:
            jump_s = max(0.0, now - self._steady() - self._offset_s)
            rules = replace(rules, max_age_s=rules.max_age_s + jump_s)
        inventory = self._scan(in_use, command.scope)
        if command.agent is not None:
            inventory = of_agent(inventory, command.agent)
        gc_plan = plan(inventory, rules, now)
        if command.is_dry:
            victims = tuple(doomed.item for doomed in gc_plan.files)
            return GCResult(victims, gc_plan.n_before, gc_plan.n_after, is_dry=True)
        self._n_bytes = None
        return carry_out(gc_plan, self._store.disk)

    def _scan(self, in_use: frozenset[Ref], scope: GCScope) -> DiskInventory:
        folders = slot_folder_registry.known(self.root)
        inventory = scan_disk(self._store, folders, self._agents, in_use)
        if scope is GCScope.ALL:
            return inventory
        spared = frozenset(context.path for context in inventory.contexts)
        return DiskInventory(inventory.files, inventory.contexts, in_use, spared)
