"""Parts of an engine that several machines compute together."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from msgspec.structs import replace

from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.interfaces import KVStore
from mlxstack.core.model_info import Identity, ModelFacts
from mlxstack.core.preset import PrefixCacheSpec, Preset
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.device_memory import MemoryPlan
from mlxstack.engine.kv.kv_layouts import KVLayouts
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.length_rope import exact_ropes
from mlxstack.engine.model.runner import ModelParts, ModelRunner
from mlxstack.engine.parts import EngineParts
from mlxstack.features.ranks.group import RankGroup
from mlxstack.features.ranks.mirrors import (
    MirroredContext,
    MirroredPrefixCache,
    MirroredRunner,
    MirroredStore,
)
from mlxstack.features.ranks.sharding import divide
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.attention_kernels import PrefillAttention


class RankedParts(EngineParts):
    """Parts whose operations all ranks of a group repeat. Not thread-safe."""

    # Ranks have to come to one verdict, so that none of them runs out of time.
    check_s = inf
    has_hidden_states = False
    can_embed = False
    can_group = False
    can_be_exact = False
    can_share = False
    is_alone = False

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.after_step = (group.flush,)
        self.reporters = (self._report,)

    @property
    def lost(self) -> str:  # type: ignore[override]
        """Why the group cannot go on; empty while it can."""
        return self._group.lost

    def when_lost(self, call: Callable[[StackError], None]) -> None:
        self._group.on_lost = call

    def load(self, preset: Preset, progress: LoadProgress) -> LoadedModel:
        """Load the shard of this rank, and compare it. Raises SetupError, Broken."""
        world = self._group.open(preset)
        loaded = loader.load(
            preset.model, preset.kv, progress, divide=partial(divide, world, preset.model.id)
        )
        if exact_ropes(loaded.model) is not None:
            raise SetupError(
                f"the rotary embedding of {preset.model.id} depends on the length of a text "
                "(rope_scaling `dynamic`), which several machines do not compute; remove hosts"
            )
        self._group.compare(loaded.facts.identity)
        return loaded

    def kv_identity(self, facts: ModelFacts, check: BatchingCheck, preset: Preset) -> Identity:
        """Identity of the KV of this rank."""
        return loader.kv_identity(facts.identity, check.kv, preset.kv, size=self._group.size)

    def agree(
        self, check: BatchingCheck, plan: MemoryPlan, bytes_per_token: int, *, is_measured: bool
    ) -> MemoryPlan:
        """The least memory of all ranks. Raises SetupError."""
        return self._group.agree(check, plan, bytes_per_token, is_measured=is_measured)

    def compile(
        self, runner: ModelRunner, factory: CacheFactory, n_slots: int, *, is_drafting: bool
    ) -> None:
        """Compile nothing: every rank would have to choose alike."""

    def choose_kernels(
        self, runner: ModelRunner, factory: CacheFactory, planned: PrefillAttention
    ) -> PrefillAttention:
        """The planned kernels: a rank of another generation would choose others."""
        return planned

    def prefix_cache(
        self, identity: str, spec: PrefixCacheSpec, budget: int, quantized_start: int
    ) -> PrefixCache:
        return MirroredPrefixCache(self._group, identity, spec, budget, quantized_start)

    def contexts(self, factory: CacheFactory, n_slots: int) -> list[SlotContext]:
        return [MirroredContext(factory, self._group) for _ in range(n_slots)]

    def runner(self, model: Any, check: BatchingCheck, parts: ModelParts | None) -> ModelRunner:
        return MirroredRunner(model, self._group, check.rows)

    def store(self, store: KVStore) -> KVStore:
        return MirroredStore(store, self._group)

    def layouts(self, runner: ModelRunner, factory: CacheFactory) -> KVLayouts:
        """Layouts that are not compared: this rank has a part of each pass."""
        return KVLayouts(None, factory)

    def _report(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the records that were sent."""
        counters = replace(
            snapshot.counters,
            n_rank_records=self._group.n_records,
            n_rank_bytes=self._group.n_bytes,
        )
        return replace(snapshot, counters=counters)

    def end(self) -> None:
        """End the session; the other ranks unload the model too."""
        self._group.end()
