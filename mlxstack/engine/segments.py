"""KV of a stretch of tokens, packed for keeping: few arrays, evaluated, detached, addressable.

All sliceable layers of a segment are packed into one array per shape and dtype (two at most for
ordinary models), because Metal limits the number of live buffers.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.ports import Blob, Plane
from mlxstack.engine import layers
from mlxstack.engine.context import Checkpoint, Context
from mlxstack.engine.layers import Frozen

LONGEST = 2048

DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Segment(Struct, frozen=True):
    """KV of the tokens [start, end): arrays of shape (parts, heads, end - start, dim).

    `order` names the group of every part, layer by layer; parts of one group keep their order.
    """

    start: int
    end: int
    groups: tuple[mx.array, ...]
    order: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(group.nbytes for group in self.groups)


def pieces(start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) cut at multiples of the longest segment."""
    cuts = [start, *range(start - start % LONGEST + LONGEST, end, LONGEST), end]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def pack(context: Context, start: int, end: int) -> Segment:
    """The sliceable layers of these tokens, packed, evaluated and detached."""
    parts = [p for leaf in _sliceable(context) for p in layers.span(leaf, start, end)]
    groups: dict[tuple[Any, ...], list[mx.array]] = {}
    for part in parts:
        groups.setdefault(_signature(part), []).append(part)
    index = {signature: i for i, signature in enumerate(groups)}
    packed = [mx.concatenate(group, axis=0) for group in groups.values()]
    mx.eval(packed)
    return Segment(start, end, tuple(packed), tuple(index[_signature(p)] for p in parts))


def spans(
    template: Context, segments: Sequence[Segment], n_tokens: int
) -> list[list[list[mx.array]]]:
    """What `Context.adopt` takes: for each sliceable layer, its spans of the first `n_tokens`.

    Segments are ascending and may overlap: the next one's start ends the one before.
    """
    ends = [*(segment.start for segment in segments[1:]), n_tokens]
    widths = [layers.n_parts(leaf) for leaf in _sliceable(template)]
    by_layer: list[list[list[mx.array]]] = [[] for _ in widths]
    for segment, end in zip(segments, ends, strict=True):
        parts = iter(_unpack(segment, end - segment.start))
        for layer, width in zip(by_layer, widths, strict=True):
            layer.append([next(parts) for _ in range(width)])
    return by_layer


def to_blob(segment: Segment, key: str, identity: str) -> Blob:
    """The segment as bytes. The planes look into the arrays; nothing is copied."""
    planes = tuple(to_plane(group) for group in segment.groups)
    meta = json.dumps(segment.order)
    return Blob(key, "segment", identity, segment.start, segment.end, planes, meta)


def from_blob(blob: Blob) -> Segment:
    """The segment that `to_blob` was given, in arrays of its own."""
    groups = tuple(from_plane(plane) for plane in blob.planes)
    return Segment(blob.start, blob.end, groups, tuple(json.loads(blob.meta)))


def checkpoint_to_blob(checkpoint: Checkpoint, key: str, identity: str) -> Blob:
    """A checkpoint as bytes; unset arrays and the layers' numbers go to the blob's meta."""
    meta = [[[a is not None for a in f.arrays], f.numbers] for f in checkpoint.frozen]
    arrays = [a for f in checkpoint.frozen for a in f.arrays if a is not None]
    planes = tuple(to_plane(array) for array in arrays)
    at = checkpoint.position
    return Blob(key, "checkpoint", identity, 0, at, planes, json.dumps(meta))


def checkpoint_from_blob(blob: Blob) -> Checkpoint:
    """The checkpoint that `checkpoint_to_blob` was given."""
    planes = iter(blob.planes)
    frozen = tuple(
        Frozen(
            tuple(from_plane(next(planes)) if is_set else None for is_set in present),
            tuple(numbers),
        )
        for present, numbers in json.loads(blob.meta)
    )
    return Checkpoint(blob.end, frozen)


def to_plane(array: mx.array) -> Plane:
    """The bytes of an evaluated array, not copied."""
    flat: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
    data = memoryview(flat)
    return Plane(DTYPES[array.dtype], tuple(array.shape), data)


def from_plane(plane: Plane) -> mx.array:
    """An array of its own from bytes."""
    data: Any = memoryview(plane.data)
    return mx.array(data).view(BY_NAME[plane.dtype]).reshape(plane.shape)


def _sliceable(context: Context) -> list[Any]:
    return [leaf for leaf in context.leaves if layers.is_sliceable(leaf)]


def _signature(part: mx.array) -> tuple[Any, ...]:
    return part.dtype, part.shape[1], part.shape[3]


def _unpack(segment: Segment, n_tokens: int) -> list[mx.array]:
    """The parts in layer order, each (1, heads, n_tokens, dim)."""
    taken = [0] * len(segment.groups)
    parts = []
    for group in segment.order:
        at = taken[group]
        taken[group] += 1
        parts.append(segment.groups[group][at : at + 1, :, :n_tokens])
    return parts
