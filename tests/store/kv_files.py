"""Blobs and manifests to store."""

import math

from hypothesis import strategies as st

from mlxstack.core.interfaces import KVFile, Manifest, TensorBytes
from mlxstack.store.kv_file_format import ITEM_BYTES

IDENTITY = "0123456789abcdef" * 2
KEY = "ab" * 16


def small_blob(key: str = KEY, payload: bytes = b"\x01\x02\x03\x04") -> KVFile:
    planes = (TensorBytes("BF16", (1, len(payload) // 2), payload), TensorBytes("U8", (3,), b"xyz"))
    return KVFile(key, "segment", IDENTITY, 128, 256, planes, '{"layers":[0,5]}')


def manifest(*keys: str, tokens: tuple[int, ...] = (1, 2, 3)) -> Manifest:
    return Manifest(IDENTITY, tokens, keys, (), 100)


@st.composite
def planes(draw: st.DrawFn) -> TensorBytes:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    n_bytes = ITEM_BYTES[dtype] * math.prod(shape)
    return TensorBytes(dtype, shape, draw(st.binary(min_size=n_bytes, max_size=n_bytes)))


KEYS = st.text("0123456789abcdef", min_size=4, max_size=32)
BLOBS = st.builds(
    KVFile,
    key=KEYS,
    kind=st.sampled_from(["segment", "checkpoint"]),
    identity=KEYS,
    start=st.integers(0, 2**40),
    end=st.integers(0, 2**40),
    tensors=st.lists(planes(), max_size=5).map(tuple),
    meta=st.text(),
)
MANIFESTS = st.builds(
    Manifest,
    identity=KEYS,
    tokens=st.lists(st.integers(0, 2**32)).map(tuple),
    segments=st.lists(KEYS).map(tuple),
    checkpoints=st.lists(KEYS).map(tuple),
    n_bytes=st.integers(0, 2**62),
)
