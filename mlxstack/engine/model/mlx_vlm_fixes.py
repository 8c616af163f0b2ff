"""Fixes of models of mlx-vlm 0.7.

Each is applied when a model of its module is loaded. KV that is reused must be that of a prompt
computed at once, and rows must be computed as alone.
"""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as lm_cache
from xxhash import xxh3_64_hexdigest

from mlxstack.engine.model.row_modules import by_row

OVERLAPPING = 4
"""Tokens of the windows of DeepSeek V4 that see the window before."""


class WindowBefore:
    """Pooled KV that keeps its last complete window.

    A mixin of mlx-vlm's `PoolingCache`. DeepSeek V4 compresses windows of four tokens together
    with the window before, which mlx-vlm has within a pass only. That window goes before those of
    the next pass, and its own compression, which is in the pool already, is dropped.
    """

    ratio: int

    def __init__(self, ratio: int) -> None:
        super().__init__(ratio)  # type: ignore[call-arg]
        self._before: tuple[mx.array, mx.array] | None = None
        self._n_known = 0

    def accumulate_windows(
        self, kv: mx.array, gate: mx.array, offset: Any
    ) -> tuple[mx.array, mx.array, Any]:
        """Complete windows (batch, tokens, dim), gates, first position."""
        kv, gate, start = super().accumulate_windows(kv, gate, offset)  # type: ignore[misc]
        self._n_known = 0
        if not kv.shape[1]:
            return kv, gate, start
        before = self._before
        self._before = kv[:, -self.ratio :], gate[:, -self.ratio :]
        if before is None:
            return kv, gate, start
        self._n_known = 1
        kv = mx.concatenate([before[0], kv], axis=1)
        gate = mx.concatenate([before[1], gate], axis=1)
        return kv, gate, start - self.ratio

    def update_and_fetch(self, pooled: mx.array) -> mx.array:
        """Append compressed windows (batch, n, dim); returns all."""
        new = pooled[:, self._n_known :]
        self._n_known = 0
        whole: mx.array = super().update_and_fetch(new)  # type: ignore[misc]
        return whole

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """State, with the window before."""
        snapshot: dict[str, Any] = super().prefix_cache_snapshot()  # type: ignore[misc]
        return {**snapshot, "before": self._before}

    def prefix_cache_restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore what `prefix_cache_snapshot` returned."""
        super().prefix_cache_restore(snapshot)  # type: ignore[misc]
        before = snapshot["before"]
        self._before = None if before is None else tuple(before)


def _fix_deepseek_v4(module: Any) -> None:
    pooling = module.PoolingCache
    overlapping = type("OverlappingPoolingCache", (WindowBefore, pooling), {})
    overlapping.__module__ = pooling.__module__
    module.PoolingCache = lambda ratio: (overlapping if ratio == OVERLAPPING else pooling)(ratio)
    # Blocks of windows hold some that come later in the pass: none are formed.
    module.Indexer.index_block = property(lambda _: 0, lambda *_: None)


def _fix_glm5_next(module: Any) -> None:
    """Keep no keys and values of all heads beside the latent KV.

    Passes of a few tokens do not append to them, so that a copy would have them at wrong
    positions.
    """
    attention = module.Glm5NextAttention
    attention.__call__ = _without_last_cache(attention.__call__)
    make = module.LanguageModel.make_cache

    def make_cache(self: Any) -> list[Any]:
        return [
            lm_cache.CacheList(*layer.caches[:-1])
            if isinstance(layer, lm_cache.CacheList)
            else layer
            for layer in make(self)
        ]

    module.LanguageModel.make_cache = make_cache


def _without_last_cache(call: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of a layer that no longer has the last of its caches."""

    @wraps(call)
    def called(
        self: Any,
        x: mx.array,
        padding_mask: Any = None,
        cache: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        own = None if cache is None else [*cache, None]
        return call(self, x, padding_mask, own, *more, **named)

    return called


def _fix_hy_v4(module: Any) -> None:
    """Compile its choice of keys for each length.

    Compiled without shapes, `argpartition` cuts where the first prompt had its last keys. Its KV
    is that of mlx-lm but for its growth.
    """
    indexer: Any = sys.modules[f"{module.__package__}.indexer"]
    partition = indexer._partition_scores
    indexer._partition_scores = partition.__wrapped__
    module.HyV4KVCache = lm_cache.KVCache


def _fix_qwen4_exp(module: Any) -> None:
    """Attend row by row in its decode passes.

    They call no attention modules.
    """
    passes = module.Qwen4ExpBatchInvariantForward
    passes._qsa_attention = by_row(passes._qsa_attention)


FIXES: dict[str, Callable[[Any], None]] = {
    "mlx_vlm.models.deepseek_v4.language": _fix_deepseek_v4,
    "mlx_vlm.models.glm5_next.language": _fix_glm5_next,
    "mlx_vlm.models.hy_v4.language": _fix_hy_v4,
    "mlx_vlm.models.qwen4_exp.language": _fix_qwen4_exp,
}

_fixed: set[str] = set()


def fix(name: str) -> None:
    """Apply the fix of a module, once."""
    if name in FIXES and name not in _fixed:
        _fixed.add(name)
        FIXES[name](sys.modules[name])


def revision(name: str) -> str:
    """Digest of the fix of a module; "" without one.

    That of all fixes, since KV of an earlier one may differ.
    """
    if name not in FIXES:
        return ""
    return xxh3_64_hexdigest(Path(__file__).read_bytes())
