"""KV file format: safetensors with a checksum over the whole file.

    8 bytes   length of the header, little-endian
    header    JSON: `__metadata__` (format, version, checksum, kind, identity, key, start, end,
              meta), then the planes "0", "1" ... with dtype, shape, offsets; padded with spaces
    payload   the planes, one after the other

The version is a part of every identity (`core.model_info`), so that files of two versions lie in
different folders.

The checksum is xxh3_128 of the whole file with the 32 digits of the checksum itself as zeros.
Any safetensors reader can open the file; the library itself is not used here, because it
copies every plane once more and shuffles the metadata.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
import xxhash
from msgspec import Meta, Struct

from mlxstack.core.errors import Damaged, UnknownVersion
from mlxstack.core.interfaces import KVFile, KVFileHeader, TensorBytes

FORMAT = "mlx-stack.kv"
VERSION = "1"
HEAD = f'{{"__metadata__":{{"format":"{FORMAT}","version":"{VERSION}","checksum":"'.encode()
LENGTH = 8
MAX_HEADER = 1 << 24
DIGITS = slice(LENGTH + len(HEAD), LENGTH + len(HEAD) + 32)
BLANK = b"0" * 32
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class ReadableFile(Protocol):
    """Interface of an open file for `read_into`."""

    def readinto(self, row: memoryview) -> int | None: ...


Digits = Annotated[str, Meta(pattern="^[0-9]{1,18}$")]
Natural = Annotated[int, Meta(ge=0)]


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    """The `__metadata__` of the header: safetensors allows only strings here."""

    format: str
    version: str
    checksum: str
    kind: str
    identity: str
    key: str
    start: Digits
    end: Digits
    meta: str


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Tensor of the header; `data_offsets` count from the payload's start."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


def encode(file: KVFile) -> list[bytes | memoryview]:
    """File in chunks, planes uncopied. Raises ValueError for invalid planes."""
    payload = [_as_bytes(plane) for plane in file.tensors]
    header = bytearray(_header(file))
    digest = xxhash.xxh3_128(header)
    for data in payload:
        digest.update(data)
    header[DIGITS] = digest.hexdigest().encode()
    return [bytes(header), *payload]


def head_of(file: KVFile) -> KVFileHeader:
    """The header of the file that stores this content."""
    specs = list(_specs(file.tensors))
    return _head(file.identity, file.key, file.kind, (file.start, file.end), file.meta, specs)


def decode(data: bytes) -> KVFile:
    """Decode a KV file, its tensors as views into `data`.

    Raises Damaged with the reason, or UnknownVersion.
    """
    metadata, specs, payload = _parse(data)
    _check_sizes(specs, payload.nbytes)
    _check_digest(data)
    planes = tuple(
        TensorBytes(spec.dtype, spec.shape, payload[slice(*spec.data_offsets)]) for spec in specs
    )
    span = int(metadata.start), int(metadata.end)
    return KVFile(metadata.key, metadata.kind, metadata.identity, *span, planes, metadata.meta)


def read_head(file: BinaryIO) -> KVFileHeader:
    """Read the header of an open file, and nothing else.

    Raises Damaged or UnknownVersion.
    """
    first = file.read(LENGTH)
    n_header = min(int.from_bytes(first, "little"), MAX_HEADER)
    metadata, specs, _ = _parse(first + file.read(n_header))
    span = int(metadata.start), int(metadata.end)
    return _head(metadata.identity, metadata.key, metadata.kind, span, metadata.meta, specs)


def read_into(file: ReadableFile, rows: Iterable[memoryview]) -> tuple[str, str]:
    """Read the payload of an open file into `rows`; identity and key.

    Raises Damaged or UnknownVersion.

    No byte is read twice and none is kept elsewhere: for files of hundreds of megabytes.
    """
    header = bytearray(LENGTH)
    _fill(file, memoryview(header))
    header.extend(bytes(min(int.from_bytes(header, "little"), MAX_HEADER)))
    _fill(file, memoryview(header)[LENGTH:])
    metadata, specs, _ = _parse(bytes(header))
    if not header.startswith(HEAD, LENGTH):
        raise Damaged("its header was not written by mlx-stack")
    header[DIGITS] = BLANK
    digest = xxhash.xxh3_128(header)
    n_bytes = 0
    for row in rows:
        _fill(file, row)
        digest.update(row)
        n_bytes += row.nbytes
    _check_sizes(specs, n_bytes)
    if file.readinto(memoryview(bytearray(1))):
        raise Damaged("it is longer than it says")
    if digest.hexdigest() != metadata.checksum:
        raise Damaged("its checksum does not match: some byte of it was altered")
    return metadata.identity, metadata.key


def _head(
    identity: str, key: str, kind: str, span: tuple[int, int], meta: str, specs: list[TensorSpec]
) -> KVFileHeader:
    n_bytes = max((spec.data_offsets[1] for spec in specs), default=0)
    shapes = tuple((spec.dtype, spec.shape) for spec in specs)
    return KVFileHeader(key, kind, *span, n_bytes, meta, shapes, identity)


def _fill(file: ReadableFile, row: memoryview) -> None:
    while row.nbytes:
        n_read = file.readinto(row)
        if not n_read:
            raise Damaged(f"it is cut: {row.nbytes} bytes are missing")
        row = row[n_read:]


def _header(file: KVFile) -> bytes:
    metadata = Metadata(
        format=FORMAT,
        version=VERSION,
        checksum=BLANK.decode(),
        kind=file.kind,
        identity=file.identity,
        key=file.key,
        start=str(file.start),
        end=str(file.end),
        meta=file.meta,
    )
    fields: dict[str, Any] = {"__metadata__": metadata}
    for number, spec in enumerate(_specs(file.tensors)):
        fields[str(number)] = spec
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % 8)
    assert text.startswith(HEAD)
    return len(text).to_bytes(LENGTH, "little") + text


def _specs(planes: tuple[TensorBytes, ...]) -> Iterator[TensorSpec]:
    position = 0
    for plane in planes:
        end = position + ITEM_BYTES[plane.dtype] * math.prod(plane.shape)
        yield TensorSpec(plane.dtype, plane.shape, (position, end))
        position = end


def _as_bytes(plane: TensorBytes) -> memoryview:
    view = memoryview(plane.data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if plane.dtype not in ITEM_BYTES:
        raise ValueError(f"no plane can have the dtype {plane.dtype!r}")
    if view.nbytes != ITEM_BYTES[plane.dtype] * math.prod(plane.shape):
        raise ValueError(f"{view.nbytes} bytes cannot be a {plane.dtype} of {plane.shape}")
    return view


def _parse(data: bytes) -> tuple[Metadata, list[TensorSpec], memoryview]:
    body = LENGTH + int.from_bytes(data[:LENGTH], "little")
    if len(data) < DIGITS.stop or body > len(data):
        raise Damaged(f"it is truncated or no KV file: {len(data)} bytes, header up to {body}")
    try:
        fields = msgspec.json.decode(data[LENGTH:body], type=dict[str, msgspec.Raw])
        _check_format(fields)
        metadata = msgspec.json.decode(fields.pop("__metadata__"), type=Metadata)
        specs = [
            msgspec.json.decode(fields.pop(str(number)), type=TensorSpec)
            for number in range(len(fields))
        ]
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise Damaged(f"its header is not that of a KV file: {error}") from None
    return metadata, specs, memoryview(data)[body:]


def _check_format(fields: dict[str, msgspec.Raw]) -> None:
    about = msgspec.json.decode(fields.get("__metadata__", b"{}"), type=dict[str, str])
    if about.get("format") != FORMAT:
        raise Damaged("it is no KV file of mlx-stack")
    if about.get("version") != VERSION:
        raise UnknownVersion(
            f"it has format version {about.get('version')}, this release reads {VERSION}"
        )


def _check_sizes(specs: list[TensorSpec], n_payload: int) -> None:
    ends = [0, *(spec.data_offsets[1] for spec in specs)]
    if ends[-1] != n_payload:
        raise Damaged(f"it is cut or stretched: {n_payload} of {ends[-1]} payload bytes")
    for spec, span in zip(specs, pairwise(ends), strict=True):
        n_bytes = span[1] - span[0]
        is_known = spec.dtype in ITEM_BYTES and spec.data_offsets == span
        if not is_known or n_bytes != ITEM_BYTES[spec.dtype] * math.prod(spec.shape):
            raise Damaged(f"a {spec.dtype} of {spec.shape} cannot fill the bytes {span}")


def _check_digest(data: bytes) -> None:
    view = memoryview(data)
    digest = xxhash.xxh3_128(view[: DIGITS.start])
    digest.update(BLANK)
    digest.update(view[DIGITS.stop :])
    is_whole = data.startswith(HEAD, LENGTH) and digest.hexdigest().encode() == data[DIGITS]
    if not is_whole:
        raise Damaged("its checksum does not match: some byte of it was altered")
