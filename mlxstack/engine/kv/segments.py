"""KV of a stretch of tokens, packed for keeping: few arrays, evaluated, detached, addressable.

All sliceable layers of a segment are packed into one array per shape and dtype (two at most for
ordinary models), because Metal limits the number of live buffers.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.ports import TensorBytes
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import LayerState
from mlxstack.policy.kv_records import CUT

DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class PackedSegment(Struct, frozen=True):
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
    """[start, end) cut at the multiples of `CUT`."""
    cuts = [start, *range(start - start % CUT + CUT, end, CUT), end]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def pack(context: SlotContext, start: int, end: int) -> PackedSegment:
    """The sliceable layers of these tokens, packed, evaluated and detached."""
    parts = [p for leaf in _sliceable(context) for p in cache_adapters.span(leaf, start, end)]
    groups: dict[tuple[Any, ...], list[mx.array]] = {}
    for part in parts:
        groups.setdefault(_signature(part), []).append(part)
    index = {signature: i for i, signature in enumerate(groups)}
    packed = [mx.concatenate(group, axis=0) for group in groups.values()]
    mx.eval(packed)
    return PackedSegment(start, end, tuple(packed), tuple(index[_signature(p)] for p in parts))


def whole(
    template: SlotContext, segments: Sequence[PackedSegment], n_tokens: int
) -> list[list[mx.array]]:
    """Arrays for `SlotContext.load`: per sliceable layer, those of the first `n_tokens`.

    Segments are ascending and may overlap: the next one's start ends the one before.
    """
    ends = [*(segment.start for segment in segments[1:]), n_tokens]
    widths = [cache_adapters.n_parts(leaf) for leaf in _sliceable(template)]
    by_layer: list[list[list[mx.array]]] = [[] for _ in widths]
    for segment, end in zip(segments, ends, strict=True):
        parts = iter(_unpack(segment, end - segment.start))
        for layer, width in zip(by_layer, widths, strict=True):
            layer.append([next(parts) for _ in range(width)])
    return [cache_adapters.joined(layer) for layer in by_layer]


def arrays_of(part: PackedSegment | StateCheckpoint) -> list[mx.array]:
    """All arrays of a segment or a checkpoint, in a fixed order."""
    if isinstance(part, PackedSegment):
        return list(part.groups)
    return [a for frozen in part.states for a in frozen.arrays if a is not None]


def layout_of(part: PackedSegment | StateCheckpoint) -> list[Any]:
    """Layout of the arrays of a segment, as plain JSON values."""
    if isinstance(part, PackedSegment):
        return list(part.order)
    return [[[a is not None for a in f.arrays], list(f.numbers)] for f in part.states]


def checkpoint(position: int, arrays: Sequence[mx.array], layout: Sequence[Any]) -> StateCheckpoint:
    """The checkpoint that `arrays_of` and `layout_of` took apart."""
    rest = iter(arrays)
    frozen = tuple(
        LayerState(tuple(next(rest) if is_set else None for is_set in present), tuple(numbers))
        for present, numbers in layout
    )
    return StateCheckpoint(position, frozen)


def to_plane(array: mx.array) -> TensorBytes:
    """The bytes of an evaluated array, not copied."""
    flat: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
    data = memoryview(flat)
    return TensorBytes(DTYPES[array.dtype], tuple(array.shape), data)


def from_plane(plane: TensorBytes) -> mx.array:
    """An array of its own from bytes."""
    data: Any = memoryview(plane.data)
    return mx.array(data).view(BY_NAME[plane.dtype]).reshape(plane.shape)


def _sliceable(context: SlotContext) -> list[Any]:
    return [leaf for leaf in context.leaves if cache_adapters.is_sliceable(leaf)]


def _signature(part: mx.array) -> tuple[Any, ...]:
    return part.dtype, part.shape[1], part.shape[3]


def _unpack(segment: PackedSegment, n_tokens: int) -> list[mx.array]:
    """The parts in layer order, each (1, heads, n_tokens, dim)."""
    taken = [0] * len(segment.groups)
    parts = []
    for group in segment.order:
        at = taken[group]
        taken[group] += 1
        parts.append(segment.groups[group][at : at + 1, :, :n_tokens])
    return parts
