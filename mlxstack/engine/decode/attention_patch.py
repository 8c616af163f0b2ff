"""Attention patch of mlx-lm: slots attend over their own caches.

mlx-lm's model files take `scaled_dot_product_attention` from `mlx_lm.models.base` by name when
they are imported; replacing it there first is the only thing we touch in mlx-lm. See
docs/decisions/0001-one-seam-in-mlx-lm.md.
"""

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache

from mlxstack.engine.device import has_gpu, has_nax_units
from mlxstack.engine.model.cpu_attention import attend_single, attend_tiled, is_tiled
from mlxstack.engine.model.pass_mode import current_mode
from mlxstack.engine.model.row_views import (
    CommonKV,
    KVView,
    PaddedKVView,
    PromptView,
    RaggedArray,
    row_of,
)
from mlxstack.policy.attention_kernels import Dims, can_force

_original = base.scaled_dot_product_attention
_forced: set[Dims] = set()


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of (B, heads, n, dim) queries, rows over their own keys.

    With an ordinary cache this is mlx-lm's own function, but for layers that read another
    layer's quantized KV and have no cache which says so, and on a CPU.
    """
    mode = current_mode()
    if mode is not None:
        by_mode = mode.attend(queries, keys, values, cache, scale, mask, sinks)
        if by_mode is not None:
            return by_mode
    is_alone = not isinstance(keys, RaggedArray)
    if not is_alone and len(keys) < queries.shape[0]:
        return _attend_by_slot(queries, keys, values, cache, scale, mask, sinks)
    row_keys = [keys]
    row_values = [values]
    if not is_alone:
        row_keys = keys.arrays
        row_values = values.arrays
    if queries.shape[2] == 1 and _is_plain(row_keys, mask):
        return attend_single(queries * scale, row_keys, row_values, sinks)
    if isinstance(cache, CommonKV) and not has_gpu():
        return attend_single(queries * scale, row_keys, row_values, sinks, mask)
    if is_alone:
        return _attend_alone(queries, keys, values, cache, scale, mask, sinks)
    caches: list[Any] = [None] * len(keys)
    if isinstance(cache, KVView | PaddedKVView):
        caches = cache.caches
    outputs = []
    for i, n in enumerate(keys.counts):
        row_queries = queries[i : i + 1, :, :n]
        out = _attend_alone(
            row_queries, keys[i], values[i], caches[i], scale, row_of(mask, i), sinks
        )
        padding = queries.shape[2] - n
        if padding:
            out = mx.pad(out, [(0, 0), (0, 0), (0, padding), (0, 0)])
        outputs.append(out)
    return mx.concatenate(outputs, axis=0)


def _attend_by_slot(
    queries: mx.array,
    keys: RaggedArray,
    values: RaggedArray,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of rows (tokens, heads, 1, dim) of a `PromptView`."""
    caches = cache.caches if isinstance(cache, PromptView) else [None] * len(keys)
    ends = list(accumulate(keys.counts))[:-1]
    outputs = []
    for i, own in enumerate(mx.split(queries, ends)):
        out = _attend_alone(
            own.transpose(2, 1, 0, 3), keys[i], values[i], caches[i], scale, row_of(mask, i), sinks
        )
        outputs.append(out.transpose(2, 1, 0, 3))
    return mx.concatenate(outputs, axis=0)


def _attend_alone(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Function of mlx-lm with the keys' quantization; tiles on a CPU."""
    is_array = isinstance(keys, mx.array)
    if is_array and not has_gpu() and is_tiled(queries, keys, mask):
        return attend_tiled(queries, keys, values, scale, mask, sinks)
    if is_array and _is_forced(queries, values, mask):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, force_fused=True
        )
    read = _precision(queries, keys, cache)
    if read is not cache:
        # mlx-lm scales the queries of quantized attention in place.
        queries = queries[:]
    out: mx.array = _original(
        queries, keys, values, cache=read, scale=scale, mask=mask, sinks=sinks
    )
    return out


def force_fused(dims: Dims, *, is_forced: bool) -> None:
    """Force the fused prefill kernel of these head dims, or not.

    The choice is measured and belongs to the device, so all engines of a process share it.
    """
    if is_forced:
        _forced.add(dims)
    else:
        _forced.discard(dims)


def unforce() -> bool:
    """Force no kernel from now on; whether one was forced."""
    was_forced = bool(_forced)
    _forced.clear()
    return was_forced


def _is_forced(queries: mx.array, values: mx.array, mask: Any) -> bool:
    dims = queries.shape[3], values.shape[3]
    if dims not in _forced:
        return False
    is_causal = not isinstance(mask, mx.array)
    is_half = queries.dtype != mx.float32
    has_nax = has_nax_units()
    n = queries.shape[2]
    return can_force(dims, n, is_causal=is_causal, is_half=is_half, has_nax=has_nax)


def _is_plain(keys: Sequence[Any], mask: Any) -> bool:
    """Whether rows have one query over ordinary arrays, on a CPU."""
    is_free = mask is None or isinstance(mask, str)
    return is_free and not has_gpu() and all(isinstance(array, mx.array) for array in keys)


def _precision(queries: mx.array, keys: Any, cache: Any) -> Any:
    """Quantization parameters of the keys, from cache or shapes."""
    if hasattr(cache, "bits") or not isinstance(keys, tuple | list):
        return cache
    packed, scales, _ = keys
    dim = queries.shape[-1]
    return QuantizedKVCache(dim // scales.shape[-1], packed.shape[-1] * 32 // dim)


def install() -> None:
    """Install `attend`, before any model module has the original."""
    if base.scaled_dot_product_attention is attend:
        return
    imported = [
        name
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.models.")
        and name != "mlx_lm.models.base"
        and getattr(module, "scaled_dot_product_attention", None) is _original
    ]
    assert not imported, f"imported before the engine: {', '.join(imported)}"
    base.scaled_dot_product_attention = attend
