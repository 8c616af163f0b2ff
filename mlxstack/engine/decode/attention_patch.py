"""Attention patch of mlx-lm: slots attend over their own caches.

mlx-lm's model files take `scaled_dot_product_attention` from `mlx_lm.models.base` by name when
they are imported; replacing it there first is the only thing we touch in mlx-lm. See
docs/decisions/0001-one-seam-in-mlx-lm.md.
"""

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from msgspec import Struct

from mlxstack.engine.decode.row_stack import StackedKVCache
from mlxstack.engine.device import has_gpu, has_nax_units
from mlxstack.engine.model.cpu_attention import (
    attend_single,
    attend_tiled,
    exponential,
    is_tiled,
    joined,
    products,
    softmax,
    sums,
)
from mlxstack.engine.model.prefixed_cache import PrefixedArray, length
from mlxstack.engine.model.row_views import KVView, PaddedKVView, RaggedArray, row_of
from mlxstack.policy.attention_kernels import N_VECTOR, AttentionCall, Dims, MaskKind, can_force

_original = base.scaled_dot_product_attention
_forced: set[Dims] = set()
NO_BIAS = PrefixedArray(None, None)


class KVPrecision(Struct, frozen=True):
    """Quantization of keys and values, as mlx-lm asks a cache for it."""

    group_size: int
    bits: int


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
    is_alone = not isinstance(keys, RaggedArray)
    each_keys, each_values = ([keys], [values]) if is_alone else (keys.arrays, values.arrays)
    if queries.shape[2] == 1 and _is_plain(each_keys, mask):
        return attend_single(queries * scale, each_keys, each_values, sinks)
    if isinstance(cache, StackedKVCache) and not has_gpu():
        return attend_single(queries * scale, each_keys, each_values, sinks, mask)
    if is_alone:
        return _attend_alone(queries, keys, values, cache, scale, mask, sinks)
    if any(isinstance(one, PrefixedArray) for one in each_keys):
        return _attend_prefixed(queries, keys, values, scale, mask, sinks)
    caches = cache.caches if isinstance(cache, KVView | PaddedKVView) else [None] * len(keys)
    outputs = []
    for i, n in enumerate(keys.counts):
        one = queries[i : i + 1, :, :n]
        out = _attend_alone(one, keys[i], values[i], caches[i], scale, row_of(mask, i), sinks)
        padding = queries.shape[2] - n
        outputs.append(mx.pad(out, [(0, 0), (0, 0), (0, padding), (0, 0)]) if padding else out)
    return mx.concatenate(outputs, axis=0)


def _attend_prefixed(
    queries: mx.array,
    keys: RaggedArray,
    values: RaggedArray,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one query per row; shared prefixes are read once."""
    groups: dict[int, list[int]] = {}
    for i, one in enumerate(keys.arrays):
        is_grouped = isinstance(one, PrefixedArray) and not isinstance(row_of(mask, i), mx.array)
        groups.setdefault(one.prefix_id if is_grouped else 0, []).append(i)
    outputs = []
    for key, rows in groups.items():
        own = queries if len(rows) == len(keys) else queries[mx.array(rows)]
        each_keys, each_values = ([a[i] for i in rows] for a in (keys, values))
        if key:
            biases = [_bias(row_of(mask, i)) for i in rows]
            outputs.append(_attend_group(own, each_keys, each_values, scale, biases, sinks))
            continue
        masks = None if mask is None else RaggedArray([row_of(mask, i) for i in rows])
        whole = [RaggedArray([_joined(one) for one in a]) for a in (each_keys, each_values)]
        outputs.append(attend(own, whole[0], whole[1], None, scale, masks, sinks))
    if len(outputs) == 1:
        return outputs[0]
    order = [row for rows in groups.values() for row in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate(outputs)[mx.array(places)]


def _attend_group(
    queries: mx.array,
    keys: Sequence[PrefixedArray],
    values: Sequence[PrefixedArray],
    scale: float,
    biases: Sequence[PrefixedArray],
    sinks: mx.array | None,
) -> mx.array:
    """Attention of rows on one prefix: a common product, and tails.

    Both are merged by their log-sum-exp, in float32. A row alone needs no merging.
    """
    n_rows, heads, _, dim = queries.shape
    n_kv = keys[0].n_heads
    grouped = (queries * scale).reshape(n_rows, n_kv, heads // n_kv, dim)
    if n_rows == 1 and sinks is None:
        return _attend_row(grouped, keys[0], values[0], biases[0]).reshape(1, heads, 1, -1)
    flat = grouped.swapaxes(0, 1).reshape(1, n_kv, -1, dim)
    bias = None
    if biases[0] is not NO_BIAS:
        each_bias = mx.concatenate([one.prefix for one in biases])
        bias = each_bias.reshape(n_rows, n_kv, heads // n_kv, -1).swapaxes(0, 1)
    whole = _partial([flat], [keys[0].prefix], [values[0].prefix], [bias])
    shared = [part.reshape(n_kv, n_rows, heads // n_kv, -1).swapaxes(0, 1) for part in whole]
    own = list(mx.split(grouped, n_rows))
    tails = [[one.tail for one in each] for each in (keys, values, biases)]
    if len({length(k) for k in tails[0]}) == 1:
        out, lse = _partial(own, *tails)
    else:
        alone = [_partial([a], [b], [c], [d]) for a, b, c, d in zip(own, *tails, strict=True)]
        out, lse = (joined(parts) for parts in zip(*alone, strict=True))
    total = mx.logaddexp(shared[1], lse)
    if sinks is not None:
        total = mx.logaddexp(total, sinks.astype(mx.float32).reshape(1, n_kv, -1, 1))
    merged = shared[0] * mx.exp(shared[1] - total) + out * mx.exp(lse - total)
    return merged.astype(queries.dtype).reshape(n_rows, heads, 1, -1)


def _attend_row(
    queries: mx.array, keys: PrefixedArray, values: PrefixedArray, bias: PrefixedArray
) -> mx.array:
    """Attention of one row over prefix and tail, with one softmax."""
    n_shared, precision = length(keys.prefix), _precision(queries, keys.prefix, None)
    scores = [
        _scores(queries, part, precision, one)
        for part, one in ((keys.prefix, bias.prefix), (keys.tail, bias.tail))
    ]
    weights = softmax(mx.concatenate(scores, axis=-1))
    shared, own = weights[..., :n_shared], weights[..., n_shared:]
    return _mixed(shared, values.prefix, precision) + _mixed(own, values.tail, precision)


def _partial(
    queries: Sequence[mx.array],
    keys: Sequence[Any],
    values: Sequence[Any],
    biases: Sequence[mx.array | None],
) -> tuple[mx.array, mx.array]:
    """Attention of rows over equally many keys, and its log-sum-exp.

    Queries are scaled, both results float32.
    """
    precision = _precision(queries[0], keys[0], None)
    each = zip(queries, keys, biases, strict=True)
    scores = joined([_scores(query, k, precision, bias) for query, k, bias in each])
    exact = scores.astype(mx.float32)
    most = exact.max(axis=-1, keepdims=True)
    weights = exponential(exact - most)
    total = sums(weights)
    rows = mx.split(weights.astype(queries[0].dtype), len(keys))
    mixed = joined([_mixed(row, v, precision) for row, v in zip(rows, values, strict=True)])
    return mixed.astype(mx.float32) / total, most + mx.log(total)


def _scores(
    queries: mx.array, keys: Any, precision: KVPrecision | None, bias: mx.array | None
) -> mx.array:
    """Products of queries and keys, quantized or not, and a bias."""
    if precision is None:
        out = products(queries, keys)
        return out if bias is None else out + bias.reshape(out.shape)
    packed, scales, biases = keys
    bits, size = precision.bits, precision.group_size
    return mx.quantized_matmul(queries, packed, scales, biases, True, size, bits)


def _mixed(weights: mx.array, values: Any, precision: KVPrecision | None) -> mx.array:
    """Sums of values by their weights."""
    if precision is None:
        out: mx.array = weights @ values
        return out
    packed, scales, biases = values
    bits, size = precision.bits, precision.group_size
    return mx.quantized_matmul(weights, packed, scales, biases, False, size, bits)


def _bias(mask: Any) -> PrefixedArray:
    """The scores that latent attention adds, split as the keys are."""
    return mask if isinstance(mask, PrefixedArray) else NO_BIAS


def _joined(one: Any) -> Any:
    return one.joined() if isinstance(one, PrefixedArray) else one


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
    (_forced.add if is_forced else _forced.discard)(dims)


def _is_forced(queries: mx.array, values: mx.array, mask: Any) -> bool:
    dims = queries.shape[3], values.shape[3]
    if dims not in _forced or queries.shape[2] <= N_VECTOR:
        return False
    kind = MaskKind.ARRAY if isinstance(mask, mx.array) else MaskKind.CAUSAL
    call = AttentionCall(dims, queries.shape[2], kind, queries.dtype != mx.float32)
    return can_force(call, has_nax=has_nax_units())


def _is_plain(keys: Sequence[Any], mask: Any) -> bool:
    """Whether rows have one query over ordinary arrays, on a CPU."""
    is_free = mask is None or isinstance(mask, str)
    return is_free and not has_gpu() and all(isinstance(one, mx.array) for one in keys)


def _precision(queries: mx.array, keys: Any, cache: Any) -> Any:
    """Quantization parameters of the keys, from cache or shapes."""
    if hasattr(cache, "bits") or not isinstance(keys, tuple | list):
        return cache
    packed, scales, _ = keys
    dim = queries.shape[-1]
    return KVPrecision(dim // scales.shape[-1], packed.shape[-1] * 32 // dim)


def install() -> None:
    """Install `attend`, before any model module has the original."""
    if base.scaled_dot_product_attention is attend:
        return
    early = [
        name
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.models.")
        and name != "mlx_lm.models.base"
        and getattr(module, "scaled_dot_product_attention", None) is _original
    ]
    assert not early, f"imported before the engine: {', '.join(early)}"
    base.scaled_dot_product_attention = attend
