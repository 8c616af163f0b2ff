"""The caches of a context to be, into whose own buffers KV files are read: nothing is copied."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.errors import Damaged
from mlxstack.core.ports import KVFileHeader
from mlxstack.engine.kv.codec import meta_of
from mlxstack.engine.kv.segments import BY_NAME
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.kv.uninitialized_array import unfilled
from mlxstack.engine.model import cache_adapters

Shape = tuple[str, tuple[int, ...]]


class TensorBuffer(Struct, frozen=True):
    """One part of one layer: `n_row` bytes for each token of each head.

    `base` is uint8 of (heads * room * n_row); `view` are the same bytes.
    """

    dtype: str
    heads: int
    n_row: int
    base: mx.array
    view: memoryview


class RestoreBuffers:
    """Made and adopted on the MLX thread; meanwhile others fill the `rows` of each segment.

    `heads` are those of the segments, ascending; each may begin before the end of the one before,
    which is used up to there. Raises Damaged when they do not fit together.
    """

    def __init__(self, fresh: SlotContext, heads: Sequence[KVFileHeader], n_tokens: int) -> None:
        self._fresh = fresh
        self._heads = heads
        self._n_tokens = n_tokens
        self._room = cache_adapters.with_room(n_tokens)
        self._order: list[int] = json.loads(meta_of(heads[0].meta).layout) if heads else []
        self._buffers = [_buffer(shape, self._room) for shape in self._parts(heads[:1])]
        for head in heads:
            self._check(head)

    def buffers(self, at: int) -> Iterator[memoryview]:
        """Where the bytes of the planes of segment `at` belong, in the order of its file.

        The last one also clears the room after its tokens.
        """
        head = self._heads[at]
        ends = [*(later.start for later in self._heads[at + 1 : at + 2]), self._n_tokens]
        for group in range(len(head.shapes)):
            for buffer, which in zip(self._buffers, self._order, strict=True):
                if which == group:
                    yield from self._lines(buffer, head, min(ends[0], head.end))
        if at == len(self._heads) - 1:
            self._clear_room()

    def load(self, tokens: Sequence[int], checkpoints: Sequence[StateCheckpoint]) -> SlotContext:
        """The context, once all rows are filled."""
        arrays = map(self._array, self._buffers)
        sliceable = [leaf for leaf in self._fresh.leaves if cache_adapters.is_sliceable(leaf)]
        parts = [[next(arrays) for _ in range(cache_adapters.n_parts(leaf))] for leaf in sliceable]
        self._fresh.load(tokens, parts, checkpoints)
        return self._fresh

    def _parts(self, heads: Sequence[KVFileHeader]) -> Iterator[Shape]:
        """The shape of every part, in the order of the layers."""
        for head in heads:
            for group in self._order:
                yield head.shapes[group]

    def _lines(self, buffer: TensorBuffer, head: KVFileHeader, end: int) -> Iterator[memoryview]:
        n_used, n_all = (end - head.start) * buffer.n_row, (head.end - head.start) * buffer.n_row
        for which in range(buffer.heads):
            first = (which * self._room + head.start) * buffer.n_row
            yield buffer.view[first : first + n_used]
            if n_used < n_all:
                # Read to the end of the file all the same, for its checksum.
                yield memoryview(bytearray(n_all - n_used))

    def _clear_room(self) -> None:
        for buffer in self._buffers:
            nothing = bytes((self._room - self._n_tokens) * buffer.n_row)
            for which in range(buffer.heads):
                end = (which + 1) * self._room * buffer.n_row
                buffer.view[end - len(nothing) : end] = nothing

    def _check(self, head: KVFileHeader) -> None:
        """Every segment has the parts of the first one, for its own tokens."""
        n_tokens = head.end - head.start
        found = [
            (kind, dims[1], dims[2], dims[3] * BY_NAME[kind].size) for kind, dims in head.shapes
        ]
        wanted = {
            (which, (b.dtype, b.heads, n_tokens, b.n_row))
            for which, b in zip(self._order, self._buffers, strict=True)
        }
        if json.loads(meta_of(head.meta).layout) != self._order or wanted != set(enumerate(found)):
            raise Damaged(f"the KV file {head.key} does not continue the one before")

    def _array(self, buffer: TensorBuffer) -> mx.array:
        return buffer.base.view(BY_NAME[buffer.dtype]).reshape(1, buffer.heads, self._room, -1)


def _buffer(shape: Shape, room: int) -> TensorBuffer:
    dtype, (_, heads, _, dim) = shape
    n_row = dim * BY_NAME[dtype].size
    base = unfilled(heads * room * n_row)
    flat: Any = base
    return TensorBuffer(dtype, heads, n_row, base, memoryview(flat))
