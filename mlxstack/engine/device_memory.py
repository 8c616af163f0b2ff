"""Memory limits of MLX for a model, within the recommended working set.

A command buffer that runs out of memory fails all requests in it, so admission must refuse
before that. A CPU recommends nothing: there every limit stays as it is.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.utils import load_config
from msgspec import Struct

from mlxstack.core.errors import DeviceError, SetupError, Unsupported
from mlxstack.core.formatting import size
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import AUTO, Preset, Wired
from mlxstack.engine import device
from mlxstack.engine.device import MIN_BOUND
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.host.hardware import MemoryBudget, buffer_cache_limit, mac_share, memory_limit
from mlxstack.policy.memory.capacity import (
    MARGIN_BYTES,
    ModelShape,
    kv_bits,
    kv_budget,
    max_score_bytes,
    score_bytes,
    workspace_of,
)

log = logging.getLogger(__name__)

MIN_BUDGET = 64 * 2**20
"""Minimum KV bytes of `auto`, where weights exceed the plan."""


class DeviceLimits(Struct, frozen=True):
    """Limits in bytes: cached buffers, all arrays, working set; 0: unlimited.

    `array_bytes` bounds admission. MLX's own limit is the whole working set: above its limit MLX
    runs one kernel per command buffer and waits for each.
    """

    cache_bytes: int = 0
    array_bytes: int = 0
    working_set: int = 0


class DeviceMemory:
    """The limits for one loaded model. Belongs to the MLX thread.

    `total` is the memory of this machine in bytes, or less where another one is imagined.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._previous: tuple[int, int] | None = None
        self._is_wired = False
        self.planned_bytes = 0
        """Bytes of all arrays by the plan; 0: unknown, or exceeded and told."""

    def limits(self) -> DeviceLimits:
        """The limits for the device that MLX computes on now."""
        recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
        if not recommended:
            return DeviceLimits()
        is_imagined = self._total < psutil.virtual_memory().total
        working_set = min(recommended, mac_share(self._total)) if is_imagined else recommended
        return DeviceLimits(buffer_cache_limit(working_set), memory_limit(working_set), working_set)

    def apply(self) -> None:
        """Set MLX's limits of cached buffers and of all arrays."""
        limits = self.limits()
        if not limits.array_bytes or self._previous is not None:
            return
        self._previous = (
            mx.set_cache_limit(limits.cache_bytes),
            mx.set_memory_limit(limits.working_set),
        )

    def wire(self, wired: Wired, planned_bytes: int = 0) -> None:
        """Note the plan; wire what is loaded, once, if `wired` are weights.

        Call it when only weights are in memory. A larger limit would wire KV too: each buffer made
        or freed then changes Metal's residency sets, and the kernel of macOS panics
        (https://github.com/ml-explore/mlx/issues/3186).
        """
        self.planned_bytes = planned_bytes
        working_set = self.limits().working_set
        if wired is not Wired.WEIGHTS or not (working_set and mx.metal.is_available()):
            return
        device.release()
        n_bytes = min(device.active_bytes(), working_set)
        mx.set_wired_limit(n_bytes)
        self._is_wired = True
        log.info("%s of weights are wired", size(n_bytes))

    def log_excess(self) -> None:
        """Log that arrays take more than was planned, and compare no more."""
        active = int(mx.get_active_memory())
        planned = self.planned_bytes
        self.planned_bytes = 0
        log.warning(
            "arrays take %s, %s were planned; please report it with the model",
            size(active),
            size(planned),
        )

    def restore(self) -> None:
        """Wait for all kernels, unwire, and restore MLX's limits.

        Call it before the weights are dropped: each wired buffer that is freed changes a residency
        set.
        """
        with suppress(DeviceError):
            device.synchronize()
        if self._is_wired:
            mx.set_wired_limit(0)
            self._is_wired = False
        if self._previous is None:
            return
        cache_bytes, array_bytes = self._previous
        self._previous = None
        mx.set_memory_limit(array_bytes)
        mx.set_cache_limit(cache_bytes)


class MemoryPlan(Struct, frozen=True):
    """Bytes for one model: `kv_budget` of KV, `max_cached_bytes` of freed buffers.

    `array_limit` is for all arrays but a workspace, 0 where the device recommends nothing.
    `planned_bytes` are those of weights, KV, workspace and margin, 0 as well.
    `score_bytes` is what attention stores per query token and context token, 0 when fused;
    `max_score_bytes` may be alive.
    """

    kv_budget: int
    max_cached_bytes: int
    array_limit: int = 0
    score_bytes: int = 0
    max_score_bytes: int = 0
    planned_bytes: int = 0


def memory_plan(
    preset: Preset, facts: ModelFacts, memory: MemoryBudget, limits: DeviceLimits
) -> MemoryPlan:
    """Divide memory as the planner does, bounded by what the device has.

    Raises SetupError when the device has no room for KV beside the weights.
    """
    shape = _shape(load_config(Path(facts.path)))
    pct = preset.prefix_cache.memory_budget_pct
    share = None if pct == AUTO else int(memory.total * pct / 100)
    half_bytes = 2 if limits.array_bytes else memory.half_bytes
    workspace = 0
    if shape is not None:
        kept = memory.buffered_bytes
        workspace = workspace_of(shape, preset, half_bytes, limits.working_set, kept)
    if not limits.array_bytes:
        left = kv_budget(memory.usable, facts.n_bytes, workspace)
        return MemoryPlan(max(left, MIN_BUDGET) if share is None else share, MIN_BOUND)
    workspace = workspace or limits.cache_bytes
    left = kv_budget(limits.array_bytes, facts.n_bytes, workspace)
    if left <= 0:
        raise SetupError(
            f"{preset.model.id} has {size(facts.n_bytes)} of weights and needs "
            f"{size(workspace)} beside them, but models may hold {size(limits.array_bytes)} "
            "on this device; take a smaller model or fewer bits, or lower prefill.chunk_size"
        )
    if share is not None and left < share:
        log.info("KV gets %s instead of %s: the device has no more", size(left), size(share))
    return MemoryPlan(
        kv_budget=left if share is None else min(share, left),
        max_cached_bytes=min(limits.cache_bytes, max(MIN_BOUND, workspace)),
        array_limit=limits.array_bytes - workspace,
        score_bytes=score_bytes(shape, kv_bits(preset)) if shape is not None else 0,
        max_score_bytes=max_score_bytes(preset, limits.working_set),
        planned_bytes=facts.n_bytes + workspace + MARGIN_BYTES + min(left, share or left),
    )


def _shape(config: dict[str, Any]) -> ModelShape | None:
    """Shape as the planner sees it; None for an unknown model."""
    try:
        return shape_of_config(config)
    except Unsupported as why:
        log.info("the workspace is not planned: %s", why.message)
        return None
