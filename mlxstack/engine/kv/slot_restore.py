"""Slot restore: reads KV files into new caches' buffers (zero-copy).

Manifests are read on the reader thread, KV files on several threads; arrays are made on the MLX
thread.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO, RawIOBase
from typing import Any, TypeVar

import mlx.core as mx
from msgspec import Struct
from numpy.lib import format as npy

from mlxstack.core.commands import SlotRestoreResult
from mlxstack.core.errors import BadRequest, Damaged, NotFound
from mlxstack.core.interfaces import KVFile, KVFileHeader, KVStore, Manifest, SlotFileStore
from mlxstack.core.prompt_tokens import TokenRow
from mlxstack.engine import device
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.kv_layouts import KVLayouts
from mlxstack.engine.kv.segments import BY_NAME, check_cover, check_state, meta_of
from mlxstack.engine.kv.slot_context import KVSources, SlotContext, StateCheckpoint
from mlxstack.engine.model import cache_adapters
from mlxstack.policy.kv.block_hash import BlockHashes


class _Blank(RawIOBase):
    """File of an npy array that has only its header."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        header = BytesIO()
        about = {"descr": "|u1", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(header, about)
        self._header = header.getvalue()
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        part = self._header[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(buffer)
        return len(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._at + offset
        return self._at


def unfilled(*shape: int) -> mx.array:
    """Evaluated bytes of this shape with whatever was in their memory before.

    Each dimension is an int32 in MLX, so more than 2 GiB need two.

    `mx.zeros` touches every page of fresh memory, which takes as long as reading a file into it.
    MLX has no other array but a loaded one whose first writer is the caller.
    """
    blank: Any = _Blank(shape)
    with device.LOADING:
        array = mx.load(blank, format="npy")
        assert isinstance(array, mx.array)
        mx.eval(array)
        # The stream's thread lets go of the Python object last, which needs the GIL too.
        mx.synchronize(mx.default_stream(mx.cpu))
    return array


Shape = tuple[str, tuple[int, ...]]


class TensorBuffer(Struct, frozen=True):
    """Buffer of a layer's part: `n_row` bytes per token and head.

    `base` is uint8 of (heads * room, n_row); `view` are the same bytes, flat.
    """

    dtype: str
    heads: int
    n_row: int
    base: mx.array
    view: memoryview


class RestoreBuffers:
    """Buffers of a restore; other threads fill each segment's `rows`.

    `headers` are those of the segments, ascending; each may begin before the end of the one before,
    which is used up to there. Raises Damaged when they do not fit together.
    """

    def __init__(self, fresh: SlotContext, headers: Sequence[KVFileHeader], n_tokens: int) -> None:
        self._fresh = fresh
        self._headers = headers
        self._n_tokens = n_tokens
        self._room = cache_adapters.with_room(n_tokens)
        self._order: list[int] = json.loads(meta_of(headers[0].meta).layout) if headers else []
        self._buffers = [
            _buffer(head.shapes[group], self._room) for head in headers[:1] for group in self._order
        ]
        for head in headers:
            self._check(head)

    def buffers(self, index: int) -> Iterator[memoryview]:
        """Buffers for the planes of segment `index`, in file order.

        The last one also clears the room after its tokens.
        """
        head = self._headers[index]
        ends = [*(later.start for later in self._headers[index + 1 : index + 2]), self._n_tokens]
        for group in range(len(head.shapes)):
            for buffer, which in zip(self._buffers, self._order, strict=True):
                if which == group:
                    yield from self._lines(buffer, head, min(ends[0], head.end))
        if index == len(self._headers) - 1:
            self._clear_room()

    def load(self, manifest: Manifest, checkpoints: Sequence[StateCheckpoint]) -> SlotContext:
        """The context of a manifest, once all rows are filled."""
        arrays = map(self._array, self._buffers)
        sliceable = [leaf for leaf in self._fresh.leaves if cache_adapters.is_sliceable(leaf)]
        parts = [[next(arrays) for _ in range(cache_adapters.n_parts(leaf))] for leaf in sliceable]
        sources = KVSources(manifest.segments, manifest.checkpoints, self._room, is_from_disk=True)
        self._fresh.load(manifest, parts, checkpoints, sources)
        return self._fresh

    def _lines(self, buffer: TensorBuffer, head: KVFileHeader, end: int) -> Iterator[memoryview]:
        n_used = (end - head.start) * buffer.n_row
        n_all = (head.end - head.start) * buffer.n_row
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
        """Check that segments have equal parts, for their own tokens."""
        n_tokens = head.end - head.start
        actual = [
            (kind, dims[1], dims[2], dims[3] * BY_NAME[kind].size) for kind, dims in head.shapes
        ]
        expected = {
            (which, (b.dtype, b.heads, n_tokens, b.n_row))
            for which, b in zip(self._order, self._buffers, strict=True)
        }
        if json.loads(meta_of(head.meta).layout) != self._order or expected != set(
            enumerate(actual)
        ):
            raise Damaged(f"the KV file {head.key} does not continue the one before")

    def _array(self, buffer: TensorBuffer) -> mx.array:
        return buffer.base.view(BY_NAME[buffer.dtype]).reshape(1, buffer.heads, self._room, -1)


def _buffer(shape: Shape, room: int) -> TensorBuffer:
    dtype, (_, heads, _, dim) = shape
    n_row = dim * BY_NAME[dtype].size
    base = unfilled(heads * room, n_row)
    rows: Any = base
    return TensorBuffer(dtype, heads, n_row, base, memoryview(rows).cast("B"))


T = TypeVar("T")

READERS = 4
"""Threads that read the files of one context."""


class RestoreRequest(Struct, frozen=True):
    """Restore of a slot file to a context, within `n_ctx`.

    `room` makes room for a number of bytes, or raises a StackError.
    """

    name: str
    context: SlotContext
    n_ctx: int
    room: Callable[[int], None]


class RestoreSource(Struct, frozen=True):
    """Slot file with the headers of its segments and checkpoints."""

    manifest: Manifest
    headers: tuple[KVFileHeader, ...]
    checkpoint_headers: tuple[KVFileHeader, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(head.n_bytes for head in (*self.headers, *self.checkpoint_headers))


class SlotRestore:
    """Restores slot files; `post` runs a function on the MLX thread.

    `chains` are the block hashes of tokens under a salt, callable from any thread. `on_loaded` is
    called with every restored context.
    """

    def __init__(
        self,
        store: KVStore,
        slot_files: SlotFileStore,
        identity: str,
        layouts: KVLayouts,
        chains: Callable[[TokenRow, str], tuple[BlockHashes, ...]],
        reader: Executor,
        post: Callable[[Callable[[], None]], None],
        on_loaded: Callable[[SlotContext, Manifest], None],
    ) -> None:
        self._store = store
        self._slot_files = slot_files
        self._identity = identity
        self._layouts = layouts
        self._chains = chains
        self._reader = reader
        self._post = post
        self._on_loaded = on_loaded
        self._queue: deque[Callable[[], None]] = deque()

    def start(self, request: RestoreRequest) -> "Future[SlotRestoreResult]":
        """The future raises NotFound, Damaged, BadRequest or OutOfMemory.

        Then the context is as it was. It is done on the MLX thread. One file is restored at a
        time: each makes room beside what the one before has become.
        """
        result: Future[SlotRestoreResult] = Future()
        result.add_done_callback(self._next)
        self._queue.append(partial(self._begin, request, result))
        if len(self._queue) == 1:
            self._queue[0]()
        return result

    def _next(self, _: "Future[SlotRestoreResult]") -> None:
        self._queue.popleft()
        if self._queue:
            self._queue[0]()

    def _begin(self, request: RestoreRequest, result: "Future[SlotRestoreResult]") -> None:
        started = time.perf_counter()

        def make_room(source: RestoreSource) -> None:
            n_tokens = len(source.manifest.tokens)
            n_ctx = request.n_ctx
            if n_tokens > n_ctx:
                raise BadRequest(
                    f"{request.name} holds {n_tokens} tokens, a slot of this service {n_ctx}",
                    "filename",
                )
            for head in source.headers:
                self._layouts.check_head(head)
            request.room(source.n_bytes)
            buffers = RestoreBuffers(request.context.new_empty(n_tokens), source.headers, n_tokens)
            reading = self._reader.submit(self._read_into, request.name, source, buffers)
            self._then(reading, lambda files: take_over(source, buffers, files), result)

        def take_over(
            source: RestoreSource, buffers: RestoreBuffers, files: Sequence[KVFile]
        ) -> None:
            parts = [self._layouts.part_of(file) for file in files]
            checkpoints = [part for part in parts if isinstance(part, StateCheckpoint)]
            n_tokens = len(source.manifest.tokens)
            context = request.context
            if n_tokens:
                context.take_over(buffers.load(source.manifest, checkpoints))
            else:
                context.clear()
            # The salt is that of the tenant that saved it, not of the request that restores it.
            context.assign(source.manifest.salt, None, n_tokens)
            self._on_loaded(context, source.manifest)
            n_bytes = source.manifest.n_bytes
            took = 1000 * (time.perf_counter() - started)
            result.set_result(SlotRestoreResult(-1, request.name, n_tokens, n_bytes, took))

        self._then(self._reader.submit(self._inspect, request.name), make_room, result)

    def _then(
        self, done: "Future[T]", step: Callable[[T], None], result: "Future[SlotRestoreResult]"
    ) -> None:
        """Continue on the MLX thread; an error is the result."""

        def run(future: "Future[T]") -> None:
            try:
                step(future.result())
            except Exception as error:
                result.set_exception(error)
                raise_device_error(error)

        # The future is handed on and not held by its own callback: nothing waits for the collector.
        done.add_done_callback(lambda outcome: self._post(lambda: run(outcome)))

    def _inspect(self, name: str) -> RestoreSource:
        manifest = self._slot_files.read(name)
        if manifest.identity != self._identity:
            raise Damaged(
                f"the slot file {name} was saved with another model, adapter, KV precision or "
                "version of mlx-lm; compute the context again, or run what it was saved with"
            )
        headers, checkpoints = (
            _each(name, keys, lambda key: self._store.head(self._identity, key))
            for keys in (manifest.segments, manifest.checkpoints)
        )
        check_cover(name, manifest, headers)
        chains = self._chains(manifest, manifest.salt)
        for head in checkpoints:
            check_state(head, manifest, chains)
        return RestoreSource(manifest, headers, checkpoints)

    def _read_into(
        self, name: str, source: RestoreSource, buffers: RestoreBuffers
    ) -> tuple[KVFile, ...]:
        """Read segments into the buffers, and return the checkpoints.

        Files are read in parallel: one thread fills fresh memory too slowly.
        """
        keys = source.manifest.segments
        checkpoints = source.manifest.checkpoints

        def pour(index: int) -> None:
            self._store.read_into(self._identity, keys[index], buffers.buffers(index))

        with _as_one(name), ThreadPoolExecutor(READERS, "pouring") as pool:
            for _ in pool.map(pour, range(len(keys))):
                pass
        return _each(name, checkpoints, lambda key: self._store.read(self._identity, key))


def _each(name: str, keys: Sequence[str], read: Callable[[str], T]) -> tuple[T, ...]:
    with _as_one(name):
        return tuple(read(key) for key in keys)


@contextmanager
def _as_one(name: str) -> Iterator[None]:
    """Report missing KV of a slot file as a damaged slot file."""
    try:
        yield
    except NotFound as error:
        raise Damaged(f"the slot file {name} needs KV that is gone: {error}") from error
