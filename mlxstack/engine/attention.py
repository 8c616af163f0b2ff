"""The one door that all attention of slots passes, put into mlx-lm before its models load.

mlx-lm's model files take `scaled_dot_product_attention` from `mlx_lm.models.base` by name when
they are imported; replacing it there first is the only thing we touch in mlx-lm. See
docs/decisions/0001-one-seam-in-mlx-lm.md.
"""

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from msgspec import Struct

from mlxstack.engine.device import has_gpu
from mlxstack.engine.rows import KVView, Rows, row_of

_original = base.scaled_dot_product_attention


class Precision(Struct, frozen=True):
    """How keys and values are quantised, as mlx-lm asks a cache for it."""

    group_size: int
    bits: int


def attend(  # noqa: PLR0913, PLR0917 (the signature is mlx-lm's)
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of (B, heads, 1, dim) queries, each over its own row's keys, without padding.

    With an ordinary cache this is mlx-lm's own function, but for layers that read another
    layer's quantised KV and have no cache which says so, and for one query on a CPU.
    """
    if not isinstance(keys, Rows):
        read = _precision(queries, keys, cache)
        if read is not cache:
            # mlx-lm scales the queries of quantised attention in place.
            queries = queries[:]
        return _attend_alone(queries, keys, values, cache=read, scale=scale, mask=mask, sinks=sinks)
    outputs = [
        _attend_alone(
            queries[i : i + 1],
            keys[i],
            values[i],
            cache=_precision(
                queries, keys[i], cache.caches[i] if isinstance(cache, KVView) else None
            ),
            scale=scale,
            mask=row_of(mask, i),
            sinks=sinks,
        )
        for i in range(len(keys))
    ]
    return mx.concatenate(outputs, axis=0)


def _attend_alone(queries: mx.array, keys: Any, values: Any, **how: Any) -> mx.array:
    """mlx-lm's function; on a CPU one query over plain keys is multiplied out, which is faster.

    There MLX's fused function is a composition of operations that also repeats shared heads.
    """
    is_plain = isinstance(keys, mx.array) and not isinstance(how["mask"], mx.array)
    if is_plain and how["sinks"] is None and queries.shape[2] == 1 and not has_gpu():
        rows, heads, _, dim = queries.shape
        n_kv = keys.shape[1]
        grouped = (queries * how["scale"]).reshape(rows, n_kv, heads // n_kv, dim)
        weights = mx.softmax(grouped @ keys.swapaxes(-1, -2), axis=-1, precise=True)
        alone: mx.array = (weights @ values).reshape(rows, heads, 1, values.shape[-1])
        return alone
    mixed: mx.array = _original(queries, keys, values, **how)
    return mixed


def _precision(queries: mx.array, keys: Any, cache: Any) -> Any:
    """What tells mlx-lm how the keys are quantised: the cache, or else what the shapes say."""
    if hasattr(cache, "bits") or not isinstance(keys, tuple | list):
        return cache
    packed, scales, _ = keys
    dim = queries.shape[-1]
    return Precision(dim // scales.shape[-1], packed.shape[-1] * 32 // dim)


def install() -> None:
    """Put `attend` in place. Asserts that no model module has taken the original before."""
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
