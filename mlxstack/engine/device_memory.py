"""Memory limits of MLX while a model is loaded, on a device that recommends a working set.

Metal ends the process when it runs out of memory, so the limits must hold before that. A CPU
recommends nothing: there every limit stays as it is.
"""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.utils import load_config, maybe_set_recommended_wired_limit
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.engine import device
from mlxstack.engine.device import MIN_BOUND
from mlxstack.host.hardware import amount
from mlxstack.host.memory_budget import buffer_cache_limit, mac_share, memory_limit
from mlxstack.policy import kv_geometry_by_model
from mlxstack.policy.capacity import kv_budget
from mlxstack.policy.kv_geometry import PLAIN_BITS

log = logging.getLogger(__name__)


class DeviceLimits(Struct, frozen=True):
    """Bytes: the cache of freed buffers, and all arrays together; 0 where there is no limit."""

    cache_bytes: int = 0
    array_bytes: int = 0


class DeviceMemory:
    """The limits for one loaded model. Belongs to the MLX thread.

    `total` is the memory of this machine in bytes, or less where another one is imagined.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._previous: tuple[int, int, int | None] | None = None

    def limits(self) -> DeviceLimits:
        """The limits for the device that MLX computes on now."""
        found = int(mx.device_info().get("max_recommended_working_set_size", 0))
        if not found:
            return DeviceLimits()
        is_imagined = self._total < psutil.virtual_memory().total
        working_set = min(found, mac_share(self._total)) if is_imagined else found
        return DeviceLimits(buffer_cache_limit(working_set), memory_limit(working_set))

    def apply(self) -> None:
        """Set the limits of MLX, and keep weights resident while the model is idle."""
        limits = self.limits()
        if not limits.array_bytes or self._previous is not None:
            return
        self._previous = (
            mx.set_cache_limit(limits.cache_bytes),
            mx.set_memory_limit(limits.array_bytes),
            maybe_set_recommended_wired_limit(),
        )

    def restore(self) -> None:
        """Set the limits as they were before `apply`; no computation may be in flight."""
        device.synchronize()
        if self._previous is None:
            return
        cache_bytes, array_bytes, wired_bytes = self._previous
        self._previous = None
        if wired_bytes is not None:
            mx.set_wired_limit(wired_bytes)
        mx.set_memory_limit(array_bytes)
        mx.set_cache_limit(cache_bytes)


class MemoryPlan(Struct, frozen=True):
    """Bytes for one model: `kv_budget` of KV, `max_cached_bytes` of freed buffers.

    `array_limit` is for all arrays but a workspace, 0 where the device recommends nothing.
    `score_bytes` is what attention stores per query token and context token, 0 when fused.
    """

    kv_budget: int
    max_cached_bytes: int
    array_limit: int = 0
    score_bytes: int = 0


def memory_plan(preset: Preset, facts: ModelFacts, total: int, limits: DeviceLimits) -> MemoryPlan:
    """Divide memory as the planner does: a share of `total`, bounded by what the device has.

    Raises SetupError when the device has no room for KV beside the weights.
    """
    share = int(total * preset.prefix_cache.memory_budget_pct / 100)
    if not limits.array_bytes:
        return MemoryPlan(share, MIN_BOUND)
    config = load_config(Path(facts.path))
    bits = PLAIN_BITS if preset.kv.quantized_start >= preset.slots.n_ctx else preset.kv.bits
    workspace = _workspace(config, preset, bits) or limits.cache_bytes
    left = kv_budget(limits.array_bytes, facts.n_bytes, workspace)
    if left <= 0:
        raise SetupError(
            f"{preset.model.id} has {amount(facts.n_bytes)} of weights and needs "
            f"{amount(workspace)} beside them, but models may hold {amount(limits.array_bytes)} "
            "on this device; take a smaller model or fewer bits, or lower prefill.chunk_size"
        )
    if left < share:
        log.info("KV gets %s instead of %s: the device has no more", amount(left), amount(share))
    return MemoryPlan(
        kv_budget=min(share, left),
        max_cached_bytes=min(limits.cache_bytes, max(MIN_BOUND, workspace)),
        array_limit=limits.array_bytes - workspace,
        score_bytes=kv_geometry_by_model.score_bytes(config, bits),
    )


def _workspace(config: dict[str, Any], preset: Preset, bits: int) -> int:
    """Bytes as the planner estimates them; 0 for a config that it cannot read."""
    chunk, slots = preset.prefill.chunk_size, preset.slots
    try:
        activations = kv_geometry_by_model.workspace_bytes(config, chunk, slots.count)
    except KeyError:
        return 0
    return activations + kv_geometry_by_model.peak_score_bytes(config, bits, chunk, slots.n_ctx)
