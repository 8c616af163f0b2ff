"""Disk quota: KV store that collects garbage before exceeding its bounds."""

import time
from collections.abc import Callable
from pathlib import Path

from mlxstack.core.commands import CollectGarbage, GCResult, GCScope
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import AUTO, DiskSpec
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.gc import (
    DiskInventory,
    GCRules,
    Ref,
    VolumeSpace,
    automatic_limit,
    carry_out,
    check_room,
    of_agent,
    plan,
    scan_disk,
    space_of,
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
        space: Callable[[Path], VolumeSpace] = space_of,
    ) -> None:
        self._store = store
        self._agents = agents
        self._spec = spec
        self._clock = clock
        self._steady = steady
        self._space = space
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

        Raises DiskFull, also beyond the daily limit. The files are counted only when the room seems
        to be short.
        """
        self._store.disk.check_limit(n_bytes)
        self._store.make_room(n_bytes, in_use)
        if self._has_room(n_bytes):
            return GCResult()
        inventory = self._scan(in_use, GCScope.ALL)
        gc_plan = plan(
            inventory,
            GCRules(self._limit(self._spec.max_bytes, inventory), None, n_bytes, SAVING_S),
            self._clock(),
        )
        check_room(gc_plan, self._spec.max_bytes)
        swept = carry_out(gc_plan, self._store.disk)
        self._n_bytes = swept.n_after + n_bytes
        return swept

    def sweep(self, command: CollectGarbage, in_use: frozenset[Ref]) -> GCResult:
        """Delete by age and bytes; unset bounds are the preset's.

        Raises BadRequest when there is no bound at all, Conflict when a slot folder is missing.
        """
        max_bytes: int | str | None = command.max_bytes
        max_age_s = command.max_age_s
        if max_bytes is None and max_age_s is None and command.agent is None:
            max_bytes = self._spec.max_bytes
            max_age_s = self._spec.max_age_s
        if max_bytes is None and max_age_s is None:
            raise BadRequest(
                "nothing bounds the disk; give --max-bytes or --older-than, "
                "or prefix_cache.disk.max_bytes in the preset"
            )
        if max_bytes == AUTO and max_age_s is None and self._space(self.root).n_spare >= 0:
            return GCResult(is_dry=command.is_dry)
        now = self._clock()
        if max_age_s is not None:
            max_age_s += max(0.0, now - self._steady() - self._offset_s)
        inventory = self._scan(in_use, command.scope)
        rules = GCRules(self._limit(max_bytes, inventory), max_age_s, grace_s=GRACE_S)
        if command.agent is not None:
            inventory = of_agent(inventory, command.agent)
        gc_plan = plan(inventory, rules, now)
        if command.is_dry:
            victims = tuple(doomed.item for doomed in gc_plan.files)
            return GCResult(victims, gc_plan.n_before, gc_plan.n_after, is_dry=True)
        self._n_bytes = None
        return carry_out(gc_plan, self._store.disk)

    def _has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes fit without a count of the files."""
        limit = self._spec.max_bytes
        if limit is None:
            return True
        if isinstance(limit, str):
            return self._space(self.root).n_spare >= n_bytes
        if self._n_bytes is None or self._n_bytes + n_bytes > limit:
            return False
        self._n_bytes += n_bytes
        return True

    def _limit(self, max_bytes: int | str | None, inventory: DiskInventory) -> int | None:
        """Maximum bytes on disk; None for no limit."""
        if isinstance(max_bytes, str):
            return automatic_limit(inventory.n_bytes, self._space(self.root))
        return max_bytes

    def _scan(self, in_use: frozenset[Ref], scope: GCScope) -> DiskInventory:
        folders = slot_folder_registry.known(self.root)
        inventory = scan_disk(self._store, folders, self._agents, in_use)
        if scope is GCScope.ALL:
            return inventory
        spared = frozenset(context.path for context in inventory.contexts)
        return DiskInventory(inventory.files, inventory.contexts, in_use, spared)
