"""Caches into which KV files are read: every byte is said by a file, or is zero."""

import json

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlxstack.core.errors import Damaged
from mlxstack.core.interfaces import KVFileHeader, Manifest
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.kv.segments import SEGMENT, RecordMeta
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.slot_restore import RestoreBuffers, unfilled
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from tests.conftest import ModelOf

N_TOKENS = 130


@pytest.fixture
def context(model_of: ModelOf) -> SlotContext:
    spec = KVSpec()
    return SlotContext(
        CacheFactory(loader.load(ModelSpec(str(model_of("tiny"))), spec).model, spec)
    )


def head_of(context: SlotContext, start: int, end: int, n_heads: int = 2) -> KVFileHeader:
    """A file that claims to hold these tokens of all layers, each part in a plane of its own."""
    n_parts = 2 * len(context.caches)
    shape = (1, n_heads, end - start, 16)
    meta = msgspec.json.encode(RecordMeta(None, (), json.dumps(list(range(n_parts))))).decode()
    return KVFileHeader(f"{start}", SEGMENT, start, end, 0, meta, (("F32", shape),) * n_parts)


def test_c2_what_no_file_says_is_zero(context: SlotContext) -> None:
    headers = [head_of(context, 0, 100), head_of(context, 80, 150)]
    landing = RestoreBuffers(context.new_empty(N_TOKENS), headers, N_TOKENS)
    for buffer in landing._buffers:
        buffer.view[:] = b"\xff" * len(buffer.view)
    for at, head in enumerate(headers):
        rows = list(landing.buffers(at))
        for row in rows:
            row[:] = bytes([at + 1]) * len(row)
        n_said = sum(len(row) for row in rows)
        assert n_said == sum(4 * int(np.prod(shape)) for _, shape in head.shapes)
    landed = landing.load(Manifest("tiny", tuple(range(N_TOKENS)), ("0", "80")), [])
    for cache in landed.caches:
        for part in (cache.keys, cache.values):
            found = np.array(part.view(mx.uint8))
            assert found.shape[2] > N_TOKENS
            assert (found[..., :80, :] == 1).all()
            assert (found[..., 80:N_TOKENS, :] == 2).all()
            assert (found[..., N_TOKENS:, :] == 0).all()


def test_c8_files_that_do_not_fit_together_are_refused(context: SlotContext) -> None:
    headers = [head_of(context, 0, 100), head_of(context, 100, 150, n_heads=7)]
    with pytest.raises(Damaged, match="does not continue"):
        RestoreBuffers(context.new_empty(N_TOKENS), headers, N_TOKENS)


@pytest.mark.parametrize("n_bytes", [1, 4096, 5_000_000])
def test_unfilled_memory_can_be_written_and_is_the_array(n_bytes: int) -> None:
    array = unfilled(n_bytes)
    assert (array.shape, array.dtype, array.nbytes) == ((n_bytes,), mx.uint8, n_bytes)
    said = np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)
    memoryview(array)[:] = memoryview(said)
    assert mx.array_equal(array, mx.array(said)).item()


def test_unfilled_memory_may_have_more_bytes_than_an_int32_counts() -> None:
    """Memory that nothing touches takes no room."""
    array = unfilled(2**16 + 1, 2**15)
    assert array.nbytes == 2**31 + 2**15
    flat = memoryview(array).cast("B")
    assert flat.nbytes == array.nbytes
    flat[-3:] = b"end"
    assert bytes(flat[-3:]) == b"end"


def test_buffers_have_two_dimensions(context: SlotContext) -> None:
    """One for the bytes of a token, so that no dimension counts more than 2**31."""
    buffers = RestoreBuffers(context.new_empty(N_TOKENS), [head_of(context, 0, 100)], N_TOKENS)
    for buffer in buffers._buffers:
        n_rows, n_row = buffer.base.shape
        assert n_row == buffer.n_row and n_rows % buffer.heads == 0
