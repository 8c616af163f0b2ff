"""Choice of fused prefill attention kernels that MLX passes over."""

import logging
import time
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from msgspec.structs import replace

from mlxstack.engine import device
from mlxstack.engine.decode.attention_patch import force_fused, unforce
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.attention_kernels import (
    FORCIBLE_DIMS,
    Dims,
    PrefillAttention,
    can_force,
    is_worth_forcing,
    prefill_attention,
)
from mlxstack.policy.scheduling.scheduler import SchedulerLimits

log = logging.getLogger(__name__)

N_QUERIES = 512
N_KEYS = 8192
N_TRIES = 3
"""Alternating tries; the fastest counts, since the first compiles."""

KERNEL_FAULTS = (ValueError, RuntimeError)
"""Errors of a kernel that MLX does not have, or that Metal cannot load."""

HEADS = ("n_heads", "num_heads", "num_attention_heads")
"""Names of the head count in mlx-lm's attention modules."""


def choose_kernels(
    runner: ModelRunner, cache_factory: CacheFactory, planned: PrefillAttention
) -> PrefillAttention:
    """Measure forced kernels of the full-attention layers; scores left to bound."""
    if not planned.score_bytes:
        return planned
    caches = cache_factory.make()
    mx.eval(runner.execute([SlotTokens(caches, mx.array([0, 0]))]))
    full = [leaf for leaf in cache_adapters.leaves(caches) if cache_adapters.is_sliceable(leaf)]
    if any(type(leaf) is not KVCache for leaf in full):
        return planned
    by_dims = {(leaf.keys.shape[3], leaf.values.shape[3]): leaf for leaf in full}
    forced = frozenset(
        dims
        for dims in FORCIBLE_DIMS & by_dims.keys()
        if _choose(dims, by_dims[dims], _n_query_heads(runner.model, by_dims[dims]))
    )
    has_nax = device.has_nax_units()
    return prefill_attention(planned, frozenset(by_dims), forced, has_nax=has_nax)


def without_forced(limits: SchedulerLimits, error: Exception) -> SchedulerLimits | None:
    """Limits of prefill without forced kernels, after one failed.

    None where the error is of another kind. Raises DeviceError.
    """
    raise_device_error(error)
    if not isinstance(error, KERNEL_FAULTS) or not unforce():
        return None
    log.warning("prefill goes on without the fused attention kernel, which failed: %s", error)
    return replace(limits, prefill=replace(limits.prefill, is_forced=False))


def _n_query_heads(model: Any, leaf: KVCache) -> int:
    """Query heads of the model, or KV heads of a nonempty cache."""
    named = (
        getattr(module, name)
        for _, module in model.named_modules()
        for name in HEADS
        if hasattr(module, name)
    )
    return int(max(leaf.keys.shape[1], next(named, 0)))


def _choose(dims: Dims, leaf: KVCache, n_heads: int) -> bool:
    is_half = leaf.keys.dtype != mx.float32
    has_nax = device.has_nax_units()
    is_forced = False
    if can_force(dims, N_QUERIES, is_causal=True, is_half=is_half, has_nax=has_nax):
        seconds = _measured(leaf, n_heads)
        is_forced = seconds is not None and is_worth_forcing(*seconds)
    force_fused(dims, is_forced=is_forced)
    if is_forced:
        log.info("prefill uses the fused attention kernel of head dims %d and %d", *dims)
    return is_forced


def _measured(leaf: KVCache, n_heads: int) -> tuple[float, float] | None:
    """Seconds of default and forced kernel; None where none can be forced.

    Raises DeviceError.
    """
    _, n_kv, _, dim = leaf.keys.shape
    shapes = ((n_heads, N_QUERIES, dim), (n_kv, N_KEYS, dim), (n_kv, N_KEYS, dim))
    arrays = [mx.random.normal((1, *shape)).astype(leaf.keys.dtype) for shape in shapes]
    mx.eval(arrays)
    attend = partial(mx.fast.scaled_dot_product_attention, scale=dim**-0.5, mask="causal")
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(N_TRIES):
            for is_forced, taken in times.items():
                began = time.perf_counter()
                mx.eval(attend(*arrays, force_fused=is_forced))
                taken.append(time.perf_counter() - began)
    except KERNEL_FAULTS as error:
        raise_device_error(error)
        log.info("no fused attention kernel: %s", error)
        return None
    return min(times[False]), min(times[True])
