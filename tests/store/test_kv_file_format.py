"""The blob format: what goes in comes out, and nothing altered is believed."""

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.errors import Damaged, UnknownVersion
from mlxstack.core.interfaces import KVFile, TensorBytes
from mlxstack.store.kv_file_format import HEAD, ITEM_BYTES, VERSION, decode, encode
from tests.store.kv_files import BLOBS, small_blob


def file_of(blob: KVFile) -> bytes:
    return b"".join(encode(blob))


@given(BLOBS)
def test_any_blob_survives(blob: KVFile) -> None:
    assert decode(file_of(blob)) == blob


@given(BLOBS)
def test_the_safetensors_library_can_read_it(blob: KVFile) -> None:
    found = dict(safetensors.deserialize(file_of(blob)))
    for number, plane in enumerate(blob.tensors):
        tensor = found.pop(str(number))
        assert (tensor["dtype"], tuple(tensor["shape"])) == (plane.dtype, plane.shape)
        assert bytes(tensor["data"]) == plane.data
    assert not found


DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of each dtype in the safetensors format."""


def test_g2_the_dtypes_are_those_of_safetensors() -> None:
    assert ITEM_BYTES == DTYPES


@pytest.mark.parametrize(("dtype", "n_bytes"), sorted(DTYPES.items()))
def test_g2_each_dtype_is_kept(dtype: str, n_bytes: int) -> None:
    data = bytes(range(6 * n_bytes))
    blob = KVFile("abcd", "checkpoint", "ef01", 0, 6, (TensorBytes(dtype, (2, 3), data),))
    assert decode(file_of(blob)).tensors[0] == blob.tensors[0]


def test_planes_may_be_views_of_arrays_and_come_back_as_readonly_views() -> None:
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    empty = np.zeros((0, 4), np.float32)
    scalar = np.array(7.0)
    planes = (
        TensorBytes("F16", array.shape, memoryview(array)),
        TensorBytes("F32", empty.shape, memoryview(empty)),
        TensorBytes("F64", (), memoryview(scalar)),
    )
    data = file_of(KVFile("abcd", "segment", "ef01", 0, 1, planes))
    found = [plane.data for plane in decode(data).tensors]
    assert all(isinstance(view, memoryview) and view.readonly for view in found)
    assert found[0].obj is data
    np.testing.assert_array_equal(np.frombuffer(found[0], np.float16).reshape(2, 3, 4), array)
    assert np.frombuffer(found[2])[0] == 7.0


def test_encoding_copies_no_plane() -> None:
    data = bytes(1000)
    chunks = encode(KVFile("abcd", "segment", "ef01", 0, 1, (TensorBytes("U8", (1000,), data),)))
    assert isinstance(chunks[1], memoryview)
    assert chunks[1].obj is data


@pytest.mark.parametrize(
    "plane",
    [
        TensorBytes("U8", (3,), b"ab"),
        TensorBytes("F4", (2,), b"a"),
        TensorBytes("BF16", (2,), b"abc"),
    ],
)
def test_an_impossible_plane_is_refused(plane: TensorBytes) -> None:
    with pytest.raises(ValueError):
        encode(KVFile("abcd", "segment", "ef01", 0, 1, (plane,)))


def test_c8_every_flipped_bit_is_found() -> None:
    data = file_of(small_blob())
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(Damaged):
                decode(bytes(altered))


def test_c8_every_truncation_and_extension_is_found() -> None:
    data = file_of(small_blob())
    for n_bytes in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:n_bytes])
    with pytest.raises(Damaged, match="stretched"):
        decode(data + b"\0")


@given(st.binary())
def test_c8_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(Damaged):
        decode(noise)


@given(st.dictionaries(st.text(), st.text(), max_size=3), st.binary(max_size=20))
def test_c8_foreign_safetensors_are_refused(metadata: dict[str, str], payload: bytes) -> None:
    tensor = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    header = msgspec.json.encode({"__metadata__": metadata, "weight": tensor})
    with pytest.raises(Damaged, match="no KV file"):
        decode(b"%b%b%b%b" % (len(header).to_bytes(8, "little"), header, b" " * 100, payload))


def test_a_deeply_nested_header_is_refused() -> None:
    header = b"[" * 100_000
    with pytest.raises(Damaged):
        decode(len(header).to_bytes(8, "little") + header)


def test_an_unknown_version_is_named() -> None:
    newer = HEAD.replace(f'"version":"{VERSION}"'.encode(), b'"version":"9"')
    with pytest.raises(UnknownVersion, match="version 9, this release reads 1"):
        decode(file_of(small_blob()).replace(HEAD, newer))
