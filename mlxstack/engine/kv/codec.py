"""Codec between index records with arrays and KV files."""

import json
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from mlxstack.core.errors import Damaged
from mlxstack.core.ports import KVFile, KVFileHeader, Manifest
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.segments import PackedSegment
from mlxstack.engine.kv.slot_context import StateCheckpoint
from mlxstack.policy import kv_records

SEGMENT = "segment"
CHECKPOINT = "checkpoint"


class RecordMeta(Struct, frozen=True):
    """The `meta` of a KV file: its place in the index, and how its planes are to be unpacked.

    `names` are hex: the block keys of a segment, or the one name of a checkpoint's tokens.
    """

    parent: str | None
    names: tuple[str, ...]
    layout: str


def file_of(
    record: kv_records.Record, part: PackedSegment | StateCheckpoint, identity: str
) -> KVFile:
    """The file of a record. The planes look into the arrays; nothing is copied."""
    if isinstance(part, PackedSegment):
        assert isinstance(record, kv_records.SegmentMeta)
        names = tuple(name.hex() for name in record.blocks)
        kind, start, end = SEGMENT, part.start, part.end
    else:
        assert isinstance(record, kv_records.CheckpointMeta)
        names = (record.state.hex(),)
        kind, start, end = CHECKPOINT, 0, part.position
    about = RecordMeta(record.parent, names, json.dumps(segments.layout_of(part)))
    planes = tuple(segments.to_plane(array) for array in segments.arrays_of(part))
    return KVFile(record.key, kind, identity, start, end, planes, _text(about))


def part_of(file: KVFile) -> PackedSegment | StateCheckpoint:
    """The arrays of a file. Raises Damaged when its meta is not ours."""
    layout = json.loads(meta_of(file.meta).layout)
    arrays = [segments.from_plane(plane) for plane in file.tensors]
    if file.kind == SEGMENT:
        return PackedSegment(file.start, file.end, tuple(arrays), tuple(layout))
    return segments.checkpoint(file.end, arrays, layout)


def record_of(head: KVFileHeader) -> kv_records.Record:
    """The index record of a file, from its head alone. Raises Damaged."""
    about = meta_of(head.meta)
    names = tuple(bytes.fromhex(name) for name in about.names)
    if head.kind == SEGMENT:
        return kv_records.SegmentMeta(
            head.key, about.parent, head.start, head.end, head.n_bytes, names
        )
    if about.parent is None or len(names) != 1:
        raise Damaged(f"the KV file {head.key} is a checkpoint of nothing")
    return kv_records.CheckpointMeta(head.key, about.parent, head.end, head.n_bytes, names[0])


def parents_first(head: KVFileHeader) -> tuple[bool, int, int]:
    """Sorts files so that every parent comes before what continues it."""
    return head.kind != SEGMENT, head.start, head.end


def check_cover(name: str, manifest: Manifest, heads: Sequence[KVFileHeader]) -> None:
    """Raises Damaged unless the segments follow each other from 0 to the last token.

    Each one may begin before the end of the one before, which is used up to there.
    """
    at = 0
    for head in heads:
        if head.start > at:
            raise Damaged(f"the slot file {name} has a gap at token {at}")
        at = head.end
    if at < len(manifest.tokens):
        raise Damaged(f"the slot file {name} ends at token {at} of {len(manifest.tokens)}")


def _text(about: RecordMeta) -> str:
    return msgspec.json.encode(about).decode()


def meta_of(meta: str) -> RecordMeta:
    """Decode the meta field of a KV file. Raises Damaged."""
    try:
        return msgspec.json.decode(meta, type=RecordMeta)
    except msgspec.MsgspecError as error:
        raise Damaged(f"a KV file does not say what it holds: {error}") from None
