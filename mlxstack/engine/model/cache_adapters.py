"""A layer's cache: made, cut, rebuilt, frozen and restored.

Sliceable caches (full attention) hold one entry per token and can be cut anywhere. Stateful
ones (sliding window, chunked, recurrent) can only be frozen as they are at one exact position, and
so can classes of mlx-vlm and of model files, by their own `state` or attributes. A kind that is
neither is never stored or rewound: fail closed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from msgspec import Struct

from mlxstack.core.preset import KVSpec
from mlxstack.engine.model.recurrent_cache import RecurrentCache

STEP: int = KVCache.step
BY_TOKEN = (KVCache, QuantizedKVCache, RotatingKVCache, ChunkedKVCache)
RECURRENT = (ArraysCache, RecurrentCache)
OWN_STATE = ("mlx_vlm.", "mlx_lm.models.")
"""Packages with caches of other classes than those of `mlx_lm.models.cache`."""


class LayerState(Struct, frozen=True):
    """State of a stateful layer at one position: arrays and numbers.

    Arrays are detached, None where unset.
    """

    arrays: tuple[Any, ...]
    numbers: tuple[int, ...] = ()
    skeleton: str = ""
    """JSON of an own state, with {"array": i} for the i-th array."""


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers in order, lists of caches opened up."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def map_leaves(caches: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Map every cache of all layers, also inside cache lists."""
    return [
        CacheList(*map_leaves(cache.caches, change))
        if isinstance(cache, CacheList)
        else change(cache)
        for cache in caches
    ]


class CacheFactory:
    """Caches for one model and one KV precision.

    With `quantized_start` > 0 a context keeps 16-bit KV until it reaches that many tokens, and
    all of it is quantized then.
    """

    def __init__(self, model: Any, kv: KVSpec) -> None:
        self._model = model
        self._kv = kv
        self.quantized_start = kv.quantized_start if kv.bits < 16 else 0
        """Position of KV quantization; 0: never, or from the first token."""
        self.can_copy = True
        """Whether contexts can be cut and copied, as the check at load found."""

    def make(self, n_tokens: int = 0) -> list[Any]:
        """Empty caches of the kinds that a context of `n_tokens` has."""
        caches: list[Any] = make_prompt_cache(self._model)
        is_due = self._kv.bits < 16 and n_tokens >= self._kv.quantized_start
        return self.quantize(caches) if is_due else caches

    def quantize(self, caches: list[Any]) -> list[Any]:
        """The caches with full-attention KV quantized; other kinds as they are."""
        return map_leaves(caches, self._quantize)

    def _quantize(self, cache: Any) -> Any:
        if type(cache) is not KVCache:
            return cache
        group_size = self._kv.group_size
        bits = self._kv.bits
        if cache.empty():
            return QuantizedKVCache(group_size=group_size, bits=bits)
        return cache.to_quantized(group_size=group_size, bits=bits)


def describe(caches: list[Any]) -> str:
    """Kind, heads, dims and dtype of every layer's filled cache."""
    return ";".join(
        f"{type(leaf).__name__}:" + ",".join(_shape(a) for _, a in tree_flatten(leaf.state))
        for leaf in leaves(caches)
    )


def _shape(value: Any) -> str:
    if not isinstance(value, mx.array):
        return ""
    dims = [n for axis, n in enumerate(value.shape) if axis != value.ndim - 2]
    return f"{dims}{value.dtype}"


def is_sliceable(leaf: Any) -> bool:
    """Whether tokens can be cut off or out of this cache."""
    return type(leaf) in (KVCache, QuantizedKVCache)


def is_stateful(leaf: Any) -> bool:
    """Whether this cache can be frozen and thawed as a whole."""
    return type(leaf) in (RotatingKVCache, ChunkedKVCache, *RECURRENT) or has_own_state(leaf)


def has_own_state(leaf: Any) -> bool:
    """Whether a cache is kept as it is.

    So are those of mlx-vlm and of model files. A check at load says whether a copy answers as the
    original.
    """
    module = type(leaf).__module__
    return module.startswith(OWN_STATE) and module != make_prompt_cache.__module__


def can_cut(leaf: Any) -> bool:
    """Whether the last tokens can be dropped; windows until they wrap."""
    if type(leaf) is RotatingKVCache:
        return bool(leaf.is_trimmable())
    if type(leaf) is ChunkedKVCache:
        return bool(leaf.start_position == 0)
    return is_sliceable(leaf)


def can_roll_back(leaf: Any) -> bool:
    """Whether a pass can be rolled back, partly or as a whole."""
    if type(leaf) is RotatingKVCache:
        return bool(leaf.keep == 0)
    return (is_sliceable(leaf) or is_stateful(leaf)) and not has_own_state(leaf)


def cut(leaf: Any, n_tokens: int) -> None:
    """Drop the last tokens of the cache's latest forward pass.

    A window holds the tokens in order after a pass of several, and enough of the older ones for
    its first token: that one stays.
    """
    if type(leaf) is not RotatingKVCache:
        leaf.trim(n_tokens)
        return
    leaf._idx = leaf.keys.shape[2] - n_tokens
    leaf.offset -= n_tokens
    leaf.keys, leaf.values = (a[..., : leaf._idx, :] for a in (leaf.keys, leaf.values))


def window_of(leaf: Any) -> int:
    """Window size of a cache in tokens; 0: unlimited, or none."""
    if isinstance(leaf, RotatingKVCache):
        return int(leaf.max_size)
    if isinstance(leaf, ChunkedKVCache):
        return int(leaf.chunk_size)
    return 0


def span(leaf: Any, start: int, stop: int) -> list[mx.array]:
    """Parts (1, heads, stop - start, dim) of a sliceable cache, lazily."""
    if leaf.empty():
        return []
    return [part[..., start:stop, :] for part in parts_of(leaf)]


def newest(leaf: KVCache | RotatingKVCache, n_tokens: int) -> list[mx.array]:
    """Keys and values (1, heads, n_tokens, dim) of the last tokens."""
    if type(leaf) is KVCache:
        return span(leaf, leaf.offset - n_tokens, leaf.offset)
    ordered = [leaf._temporal_order(a) for a in (leaf.keys, leaf.values)]
    return [a[..., a.shape[2] - n_tokens :, :] for a in ordered]


def n_parts(leaf: Any) -> int:
    """Number of arrays that `span` returns for this kind of cache."""
    return 6 if isinstance(leaf, QuantizedKVCache) else 2


def joined(spans: Sequence[Sequence[mx.array]], n_room: int = 0) -> list[mx.array]:
    """Join spans, as of `span`, into whole parts with room.

    They have room for at least `n_room` tokens, as `reserve` would make it.
    """
    n_tokens = sum(span[0].shape[2] for span in spans if span)
    n_more = max(with_room(n_tokens), in_steps(n_room)) - n_tokens
    return [_extended(parts, n_more) for parts in zip(*spans, strict=True)]


def with_room(n_tokens: int) -> int:
    """Capacity for `n_tokens`, with room, so that the next token copies nothing."""
    return n_tokens + (-n_tokens % STEP or STEP)


def in_steps(n_tokens: int) -> int:
    """Tokens rounded up to whole steps by which a cache grows."""
    return n_tokens + -n_tokens % STEP


def missing_bytes(leaf: Any, n_tokens: int) -> int:
    """Bytes that a nonempty sliceable cache lacks for `n_tokens`."""
    if not is_sliceable(leaf) or leaf.empty():
        return 0
    n_more = in_steps(n_tokens) - parts_of(leaf)[0].shape[2]
    return max(0, n_more) * sum(part.nbytes // part.shape[2] for part in parts_of(leaf))


def reserve(leaf: Any, n_tokens: int) -> None:
    """Extend a cache that is too small for `n_tokens`.

    mlx-lm grows a cache by copying all of it, at every chunk of a prefill. The copy is evaluated
    here, so that at most one layer exists twice.
    """
    parts = parts_of(leaf)
    n_more = in_steps(n_tokens) - parts[0].shape[2]
    rebuild(leaf, [_extended([part], n_more) for part in parts], leaf.offset)
    del parts
    mx.eval(parts_of(leaf))


def parts_of(leaf: Any) -> list[mx.array]:
    """Whole arrays of a nonempty sliceable cache, room included."""
    if isinstance(leaf, QuantizedKVCache):
        return [*leaf.keys, *leaf.values]
    return [leaf.keys, leaf.values]


def rebuild(leaf: Any, parts: Sequence[mx.array], n_tokens: int) -> None:
    """Fill an empty sliceable cache with parts of `with_room(n_tokens)`."""
    if isinstance(leaf, QuantizedKVCache):
        leaf.keys, leaf.values = list(parts[:3]), list(parts[3:])
    else:
        leaf.keys, leaf.values = parts
    leaf.offset = n_tokens


def snapshot_state(leaf: Any) -> LayerState:
    """Detached state of a stateful cache; windows are trimmed."""
    if has_own_state(leaf):
        return _own_state(leaf)
    if isinstance(leaf, ArraysCache):
        return LayerState(tuple(None if a is None else _detach(a) for a in leaf.cache))
    if isinstance(leaf, ChunkedKVCache):
        return _freeze_chunk(leaf)
    numbers = (leaf.offset, leaf.keep, leaf.max_size)
    if leaf.keys is None:
        return LayerState((None, None), numbers)
    return LayerState((_window(leaf, leaf.keys), _window(leaf, leaf.values)), numbers)


def restore_state(leaf: Any, frozen: LayerState) -> None:
    """Restore a frozen state into an equal cache; frozen arrays stay."""
    # A new array object each: slice assignment changes the object it is called on.
    arrays = [None if a is None else mx.array(a) for a in frozen.arrays]
    if frozen.skeleton:
        _restore_own(leaf, json.loads(frozen.skeleton), arrays)
        return
    if isinstance(leaf, ArraysCache):
        leaf.cache = arrays
        return
    leaf.keys, leaf.values = arrays
    if isinstance(leaf, ChunkedKVCache):
        leaf.offset, leaf.chunk_size, leaf.start_position = frozen.numbers
        return
    leaf.offset, leaf.keep, leaf.max_size = frozen.numbers
    leaf._idx = 0 if leaf.keys is None else leaf.keys.shape[2]


def reference_state(leaf: Any) -> LayerState | None:
    """State of an uncuttable cache before a pass, uncopied; else None.

    Only for passes of several tokens: those replace a window's arrays instead of changing them.
    """
    if isinstance(leaf, ArraysCache):
        return LayerState(tuple(leaf.cache))
    if type(leaf) is not RotatingKVCache:
        return None
    if leaf.keys is None:
        return LayerState((None, None), (0, leaf.keep, leaf.max_size))
    arrays = tuple(leaf._temporal_order(a) for a in (leaf.keys, leaf.values))
    return LayerState(arrays, (leaf.offset, leaf.keep, leaf.max_size))


def detach(leaf: Any) -> None:
    """Detach a recurrent state's buffers from its batch's."""
    if isinstance(leaf, ArraysCache):
        leaf.cache = [None if a is None else _detach(a) for a in leaf.cache]


def extend_room(leaf: Any, n_tokens: int, seed: int) -> None:
    """Append random KV of `n_tokens` to a nonempty cache.

    Two caches of the same content, lengthened with the same seed, stay the same.
    """
    if type(leaf) not in BY_TOKEN or leaf.empty() or not _is_floating(leaf.keys):
        return
    keys, values = mx.random.split(mx.random.key(seed))
    leaf.update_and_fetch(
        _noise(leaf, leaf.keys, n_tokens, keys), _noise(leaf, leaf.values, n_tokens, values)
    )


def n_bytes(leaf: Any) -> int:
    """Bytes allocated by this cache."""
    if has_own_state(leaf):
        return sum(a.nbytes for _, a in tree_flatten(leaf.state) if isinstance(a, mx.array))
    return 0 if leaf.empty() else int(leaf.nbytes)


def _extended(parts: Sequence[mx.array], n_more: int) -> mx.array:
    """The parts one after the other, with room for `n_more` tokens."""
    shape = list(parts[0].shape)
    shape[2] = n_more
    return mx.concatenate([*parts, mx.zeros(shape, parts[0].dtype)], axis=2)


def _is_floating(keys: Any) -> bool:
    """Whether keys are numbers, and not indices that a sparse layer keeps."""
    return not isinstance(keys, mx.array) or mx.issubdtype(keys.dtype, mx.floating)


def _noise(leaf: Any, like: Any, n_tokens: int, key: mx.array) -> mx.array:
    if isinstance(leaf, QuantizedKVCache):
        packed = like[0]
        scales = like[1]
        shape = (*packed.shape[:2], n_tokens, packed.shape[3] * 32 // leaf.bits)
        return mx.random.normal(shape, scales.dtype, key=key)
    shape = (*like.shape[:2], n_tokens, like.shape[3])
    return mx.random.normal(shape, like.dtype, key=key)


def _freeze_chunk(leaf: Any) -> LayerState:
    """State of a chunked cache, trimmed to at most one chunk."""
    n_held = leaf.offset - leaf.start_position
    n_kept = min(n_held, leaf.chunk_size)
    numbers = (leaf.offset, leaf.chunk_size, leaf.offset - n_kept)
    if leaf.keys is None:
        return LayerState((None, None), numbers)
    arrays = [a[..., n_held - n_kept : n_held, :] for a in (leaf.keys, leaf.values)]
    return LayerState((_detach(arrays[0]), _detach(arrays[1])), numbers)


def _window(leaf: Any, array: mx.array) -> mx.array:
    ordered = leaf._temporal_order(array)
    surplus = ordered.shape[2] - leaf.max_size
    if surplus > 0:
        head = [ordered[..., : leaf.keep, :]] if leaf.keep else []
        ordered = mx.concatenate([*head, ordered[..., surplus + leaf.keep :, :]], axis=2)
    return _detach(ordered)


def _own_state(leaf: Any) -> LayerState:
    """State that a cache names itself.

    Its attributes where it takes none back.
    """
    if hasattr(leaf, "prefix_cache_snapshot"):
        state = leaf.prefix_cache_snapshot()
    elif _takes_state(leaf):
        state = {"state": leaf.state, "meta_state": getattr(leaf, "meta_state", "")}
    else:
        state = vars(leaf)
    arrays: list[mx.array] = []
    skeleton = json.dumps(_without_arrays(state, arrays))
    return LayerState(tuple(arrays), skeleton=skeleton)


def _without_arrays(value: Any, arrays: list[mx.array]) -> Any:
    """The value, its arrays detached, appended and numbered."""
    if isinstance(value, mx.array):
        arrays.append(_detach(value) if value.ndim else mx.array(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {key: _without_arrays(inner, arrays) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(inner, arrays) for inner in value]
    return value


def _with_arrays(value: Any, arrays: Sequence[Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return arrays[value["array"]]
        return {key: _with_arrays(inner, arrays) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_arrays(inner, arrays) for inner in value]
    return value


def _restore_own(leaf: Any, skeleton: Any, arrays: Sequence[Any]) -> None:
    """Restore what `_own_state` took."""
    state = _with_arrays(skeleton, arrays)
    if hasattr(leaf, "prefix_cache_restore"):
        leaf.prefix_cache_restore(state)
        return
    if not _takes_state(leaf):
        vars(leaf).update(state)
        return
    leaf.state = state["state"]
    if state["meta_state"]:
        leaf.meta_state = state["meta_state"]


def _takes_state(leaf: Any) -> bool:
    """Whether its `state` can be set."""
    state = getattr(type(leaf), "state", None)
    return not isinstance(state, property) or state.fset is not None


def _detach(array: mx.array) -> mx.array:
    """Copy with its own buffer: a slice would keep the original."""
    return mx.concatenate([array, array[:0]], axis=0)
