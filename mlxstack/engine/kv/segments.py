"""Segments: packed KV of a token range, and their file codec.

All sliceable layers of a segment are packed into one array per shape and dtype (two at most for
ordinary models), because Metal limits the number of live buffers.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Damaged
from mlxstack.core.interfaces import KVFile, KVFileHeader, Manifest, TensorBytes
from mlxstack.core.prompt_tokens import TokenRow
from mlxstack.engine.kv.slot_context import KVSources, SlotContext, StateCheckpoint
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import LayerState
from mlxstack.policy.kv import block_hash, prefix_index
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.prefix_index import CUT

DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Segment(Struct, frozen=True):
    """Packed KV of [start, end), as arrays (parts, heads, tokens, dim).

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
    """[start, end) cut at multiples of `CUT`."""
    return list(pairwise(sorted({start, *range(start - start % CUT + CUT, end, CUT), end})))


def pack(context: SlotContext, start: int, end: int) -> Segment:
    """The sliceable layers of these tokens, packed, evaluated and detached."""
    parts = [p for leaf in _sliceable(context) for p in cache_adapters.span(leaf, start, end)]
    groups: dict[tuple[Any, ...], list[mx.array]] = {}
    for part in parts:
        groups.setdefault(_signature(part), []).append(part)
    index = {signature: i for i, signature in enumerate(groups)}
    packed = [mx.concatenate(group, axis=0) for group in groups.values()]
    mx.eval(packed)
    return Segment(start, end, tuple(packed), tuple(index[_signature(p)] for p in parts))


def whole(
    template: SlotContext, segments: Sequence[Segment], n_tokens: int, n_room: int = 0
) -> list[list[mx.array]]:
    """Arrays for `SlotContext.load`: per sliceable layer, those of the first `n_tokens`.

    Segments are ascending and may overlap: the next one's start ends the one before. The arrays
    have room for `n_room` tokens.
    """
    ends = [*(segment.start for segment in segments[1:]), n_tokens]
    widths = [cache_adapters.n_parts(leaf) for leaf in _sliceable(template)]
    by_layer: list[list[list[mx.array]]] = [[] for _ in widths]
    for segment, end in zip(segments, ends, strict=True):
        parts = iter(_unpack(segment, end - segment.start))
        for layer, width in zip(by_layer, widths, strict=True):
            layer.append([next(parts) for _ in range(width)])
    return [cache_adapters.joined(layer, n_room) for layer in by_layer]


def load(
    context: SlotContext,
    row: TokenRow,
    parts: Iterable[Segment | StateCheckpoint | None],
    sources: KVSources,
) -> None:
    """Fill an empty context with parked KV of `row`, that of `sources`."""
    loaded = list(parts)
    packed = [part for part in loaded if isinstance(part, Segment)]
    checkpoints = [part for part in loaded if isinstance(part, StateCheckpoint)]
    spans = whole(context, packed, len(row.tokens), sources.n_room)
    context.load(row, spans, checkpoints, sources)


def arrays_of(part: Segment | StateCheckpoint) -> list[mx.array]:
    """All arrays of a segment or a checkpoint, in a fixed order."""
    if isinstance(part, Segment):
        return list(part.groups)
    return [a for frozen in part.states for a in frozen.arrays if a is not None]


def layout_of(part: Segment | StateCheckpoint) -> list[Any]:
    """Layout of the arrays of a segment, as plain JSON values."""
    if isinstance(part, Segment):
        return list(part.order)
    return [[[a is not None for a in f.arrays], list(f.numbers), f.skeleton] for f in part.states]


def checkpoint(position: int, arrays: Sequence[mx.array], layout: Sequence[Any]) -> StateCheckpoint:
    """The checkpoint that `arrays_of` and `layout_of` took apart."""
    remaining = iter(arrays)
    frozen = tuple(
        LayerState(
            tuple(next(remaining) if is_set else None for is_set in present),
            tuple(numbers),
            *skeleton,
        )
        for present, numbers, *skeleton in layout
    )
    return StateCheckpoint(position, frozen)


def to_planes(arrays: Sequence[mx.array]) -> tuple[TensorBytes, ...]:
    """The bytes of evaluated arrays, not copied; waits for the device once."""
    flat: list[Any] = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    mx.eval(flat)
    return tuple(
        TensorBytes(DTYPES[array.dtype], tuple(array.shape), memoryview(data))
        for array, data in zip(arrays, flat, strict=True)
    )


def from_plane(plane: TensorBytes) -> mx.array:
    """Copy bytes into a new array."""
    data: Any = memoryview(plane.data)
    return mx.array(data).view(BY_NAME[plane.dtype]).reshape(plane.shape)


def _sliceable(context: SlotContext) -> list[Any]:
    return [leaf for leaf in context.leaves if cache_adapters.is_sliceable(leaf)]


def _signature(part: mx.array) -> tuple[Any, ...]:
    return part.dtype, part.shape[1], part.shape[3]


def _unpack(segment: Segment, n_tokens: int) -> list[mx.array]:
    """Parts of the first tokens in layer order, (1, heads, n_tokens, dim)."""
    taken = [0] * len(segment.groups)
    parts = []
    for group in segment.order:
        index = taken[group]
        taken[group] += 1
        parts.append(segment.groups[group][index : index + 1, :, :n_tokens])
    return parts


SEGMENT = "segment"
CHECKPOINT = "checkpoint"


class RecordMeta(Struct, frozen=True):
    """The `meta` of a KV file: index position and plane layout.

    `names` are hex: the block keys of a segment, or the one name of a checkpoint's tokens.
    """

    parent: str | None
    names: tuple[str, ...]
    layout: str


def file_of(record: prefix_index.Record, part: Segment | StateCheckpoint, identity: str) -> KVFile:
    """File of a record; planes are views."""
    if isinstance(part, Segment):
        assert isinstance(record, prefix_index.SegmentMeta)
        names = tuple(name.hex() for name in record.blocks)
    else:
        assert isinstance(record, prefix_index.CheckpointMeta)
        names = (record.state.hex(),)
    return file_with(RecordMeta(record.parent, names, ""), record.key, part, identity)


def file_with(
    about: RecordMeta, key: str, part: Segment | StateCheckpoint, identity: str
) -> KVFile:
    """The file of these arrays; `about` gets their layout."""
    meta = msgspec.json.encode(replace(about, layout=json.dumps(layout_of(part)))).decode()
    planes = to_planes(arrays_of(part))
    if isinstance(part, Segment):
        return KVFile(key, SEGMENT, identity, part.start, part.end, planes, meta)
    return KVFile(key, CHECKPOINT, identity, 0, part.position, planes, meta)


def part_of(file: KVFile) -> Segment | StateCheckpoint:
    """Arrays of a file. Raises Damaged for foreign meta."""
    about = meta_of(file.meta)
    try:
        arrays = [from_plane(plane) for plane in file.tensors]
        layout = json.loads(about.layout)
        if file.kind == SEGMENT:
            return Segment(file.start, file.end, tuple(arrays), tuple(layout))
        return checkpoint(file.end, arrays, layout)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise Damaged(f"the KV file {file.key} has a layout that it cannot have: {error}") from None


def record_of(head: KVFileHeader) -> prefix_index.Record:
    """The index record of a file, from its head alone. Raises Damaged."""
    about = meta_of(head.meta)
    names = tuple(bytes.fromhex(name) for name in about.names)
    if head.kind == SEGMENT:
        return prefix_index.SegmentMeta(
            head.key, about.parent, head.start, head.end, head.n_bytes, names
        )
    if about.parent is None or len(names) != 1:
        raise Damaged(f"the KV file {head.key} is a checkpoint of nothing")
    return prefix_index.CheckpointMeta(head.key, about.parent, head.end, head.n_bytes, names[0])


class SegmentLayout(Struct, frozen=True):
    """Group of every part, and (dtype, parts, heads, dim) of each group."""

    group_of_part: list[int]
    groups: list[tuple[str, int, int, int]]


def segment_layout(segment: Segment) -> SegmentLayout:
    """Layout of the arrays of a segment, each of four dimensions."""
    groups = [
        (DTYPES[group.dtype], group.shape[0], group.shape[1], group.shape[3])
        for group in segment.groups
    ]
    return SegmentLayout(list(segment.order), groups)


def layout_of_head(head: KVFileHeader) -> SegmentLayout:
    """Segment layout in a file. Raises Damaged for other tokens."""
    if any(len(dims) != 4 or dims[2] != head.end - head.start for _, dims in head.shapes):
        raise Damaged(f"the arrays of the KV file {head.key} do not fit its tokens")
    try:
        group_of_part = msgspec.json.decode(meta_of(head.meta).layout, type=list[int])
    except msgspec.MsgspecError as error:
        raise Damaged(f"the KV file {head.key} has no layout of a segment: {error}") from None
    groups = [(dtype, dims[0], dims[1], dims[3]) for dtype, dims in head.shapes]
    return SegmentLayout(group_of_part, groups)


def parents_first(head: KVFileHeader) -> tuple[bool, int, int]:
    """Sorts files so that every parent comes before what continues it."""
    return head.kind != SEGMENT, head.start, head.end


def check_cover(name: str, manifest: Manifest, headers: Sequence[KVFileHeader]) -> None:
    """Raise Damaged unless segments cover 0 to the last token.

    Each one may begin before the end of the one before, which is used up to there.
    """
    end = 0
    for head in headers:
        if head.start > end:
            raise Damaged(f"the slot file {name} has a gap at token {end}")
        end = head.end
    if end < len(manifest.tokens):
        raise Damaged(f"the slot file {name} ends at token {end} of {len(manifest.tokens)}")


def check_state(head: KVFileHeader, row: TokenRow, chains: Sequence[BlockHashes]) -> None:
    """Raise Damaged unless a checkpoint is one of `row`, by its chains."""
    is_within = 0 < head.end <= len(row.tokens)
    states = [block_hash.hash_at(c, row, head.end) for c in chains if head.end <= c.n_tokens]
    if not is_within or head.key not in map(block_hash.checkpoint_key, states):
        raise Damaged(f"the KV file {head.key} is no checkpoint of these tokens")


def meta_of(meta: str) -> RecordMeta:
    """Decode the meta field of a KV file. Raises Damaged."""
    try:
        return msgspec.json.decode(meta, type=RecordMeta)
    except msgspec.MsgspecError as error:
        raise Damaged(f"a KV file does not say what it holds: {error}") from None
