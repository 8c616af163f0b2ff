"""Parts of an engine: what computes its passes and holds its KV."""

from collections.abc import Callable
from typing import Any

from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import StackError
from mlxstack.core.interfaces import KVStore
from mlxstack.core.model_info import Identity, ModelFacts
from mlxstack.core.preset import PrefixCacheSpec, Preset
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import SELF_CHECK_S, BatchingCheck
from mlxstack.engine.decode.kernel_choice import choose_kernels
from mlxstack.engine.device_memory import MemoryPlan
from mlxstack.engine.kv.kv_layouts import KVLayouts
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.compiled_experts import compile_experts
from mlxstack.engine.model.padded_linear import pad_linear_layers
from mlxstack.engine.model.runner import ModelParts, ModelRunner
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.attention_kernels import PrefillAttention


class EngineParts:
    """Parts that compute in this process alone.

    The assembly asks for them in the order of the methods; a subclass makes others.
    """

    check_s: float = SELF_CHECK_S
    """Seconds after which no further step of the self-check begins."""
    has_hidden_states = True
    """Whether passes can return hidden states."""
    can_embed = True
    """Whether prompts may have inputs beside tokens."""
    can_be_exact = True
    """Whether passes may have a mode of their own."""
    can_group = True
    """Whether rows may be grouped in common arrays."""
    can_share = True
    """Whether prompts may share a pass."""
    is_alone = True
    """Whether a pass can run at any time, without anyone else."""
    lost: str = ""
    """Why the parts cannot go on; empty while they can."""
    after_step: tuple[Callable[[], None], ...] = ()
    """Called after each step of the engine."""
    reporters: tuple[Callable[[Snapshot], Snapshot], ...] = ()
    """Add what the parts count to each snapshot."""

    def when_lost(self, call: Callable[[StackError], None]) -> None:
        """Have `call` called, in any thread, once the parts are lost."""

    def load(self, preset: Preset, progress: LoadProgress) -> LoadedModel:
        """Load the model. Raises SetupError."""
        loaded = loader.load(preset.model, preset.kv, progress)
        if not device.has_gpu():
            pad_linear_layers(loaded.model)
        return loaded

    def kv_identity(self, facts: ModelFacts, check: BatchingCheck, preset: Preset) -> Identity:
        """Identity of the KV that is stored."""
        return loader.kv_identity(facts.identity, check.kv, preset.kv)

    def agree(
        self, check: BatchingCheck, plan: MemoryPlan, bytes_per_token: int, *, is_measured: bool
    ) -> MemoryPlan:
        """The memory plan of all parts, whose passes may be measured next."""
        return plan

    def compile(
        self, runner: ModelRunner, factory: CacheFactory, n_slots: int, *, is_drafting: bool
    ) -> None:
        """Compile the parts of the model where it pays."""
        compile_experts(runner.model, factory, n_slots, is_drafting=is_drafting)

    def choose_kernels(
        self, runner: ModelRunner, factory: CacheFactory, planned: PrefillAttention
    ) -> PrefillAttention:
        """Measure the attention kernels for prefill, and choose."""
        return choose_kernels(runner, factory, planned)

    def prefix_cache(
        self, identity: str, spec: PrefixCacheSpec, budget: int, quantized_start: int
    ) -> PrefixCache:
        return PrefixCache(identity, spec, budget, quantized_start)

    def contexts(self, factory: CacheFactory, n_slots: int) -> list[SlotContext]:
        return [SlotContext(factory) for _ in range(n_slots)]

    def runner(self, model: Any, check: BatchingCheck, parts: ModelParts | None) -> ModelRunner:
        return ModelRunner(model, rows=check.rows, parts=parts)

    def store(self, store: KVStore) -> KVStore:
        return store

    def layouts(self, runner: ModelRunner, factory: CacheFactory) -> KVLayouts:
        """Layouts against which stored KV is checked."""
        return KVLayouts(runner, factory)

    def end(self) -> None:
        """Release the parts; the model is being unloaded."""
