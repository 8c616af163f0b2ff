"""Saves contexts to slot files and brings them back; only new segments are written."""

import hashlib
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from mlxstack.core.act import Restored, Saved
from mlxstack.core.errors import Damaged, NotFound
from mlxstack.core.ports import Blob, Manifest, Shelf, Vault
from mlxstack.engine import segments
from mlxstack.engine.context import Context, Stored
from mlxstack.store.writer import Writer


class Fetched(Struct, frozen=True):
    """A slot file with all its blobs, read and checked."""

    name: str
    manifest: Manifest
    segments: tuple[Blob, ...]
    checkpoints: tuple[Blob, ...]
    started: float


class Keeper:
    """One per engine. `save` and `install` belong to the MLX thread, the rest waits elsewhere."""

    def __init__(self, vault: Vault, shelf: Shelf, identity: str) -> None:
        self._vault = vault
        self._shelf = shelf
        self._identity = identity
        self._writer = Writer()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def save(self, context: Context, slot: int, name: str) -> Future[Saved]:
        """Copy what is not on disk yet, then write it in the background, the slot file last.

        Raises BadRequest for a bad name, Busy when the writer is too far behind.
        """
        started = time.perf_counter()
        self._shelf.check(name)
        context.checkpoint()
        new = self._new_blobs(context)
        marks = [self._checkpoint_blob(context, i) for i in range(len(context.checkpoints))]
        manifest = Manifest(
            identity=self._identity,
            tokens=tuple(context.tokens),
            segments=tuple(stored.key for stored in context.stored),
            checkpoints=tuple(blob.key for blob in marks),
            n_bytes=sum(s.n_bytes for s in context.stored) + sum(map(_weight, marks)),
        )

        def write() -> Saved:
            n_written = sum(self._vault.write(blob) for blob in (*new, *marks))
            n_written += self._shelf.write(name, manifest)
            took = 1000 * (time.perf_counter() - started)
            return Saved(slot, name, len(manifest.tokens), n_written, manifest.n_bytes, took)

        return self._writer.submit(write, sum(map(_weight, (*new, *marks))))

    def fetch(self, name: str) -> Future[Fetched]:
        """Read and check a slot file and all it names. The future raises NotFound or Damaged."""
        started = time.perf_counter()
        self._shelf.check(name)
        return self._reader.submit(self._fetch, name, started)

    def install(self, context: Context, fetched: Fetched, slot: int) -> Restored:
        """Make the fetched state the slot's context. On any error the context is as it was."""
        manifest = fetched.manifest
        if manifest.tokens:
            parts = [segments.from_blob(blob) for blob in fetched.segments]
            marks = [segments.checkpoint_from_blob(blob) for blob in fetched.checkpoints]
            fresh = context.fresh(len(manifest.tokens))
            fresh.adopt(manifest.tokens, segments.spans(fresh, parts, len(manifest.tokens)), marks)
            context.become(fresh)
            context.stored = [_stored(blob) for blob in fetched.segments]
        else:
            context.clear()
        took = 1000 * (time.perf_counter() - fetched.started)
        return Restored(slot, fetched.name, len(manifest.tokens), manifest.n_bytes, took)

    def close(self) -> None:
        """Finish what waits to be written."""
        self._writer.close()
        self._reader.shutdown(wait=True)

    def _new_blobs(self, context: Context) -> list[Blob]:
        known = [s for s in context.stored if self._vault.has(self._identity, s.key)]
        if len(known) != len(context.stored):
            context.stored = []
        at = min(context.stored[-1].end, len(context)) if context.stored else 0
        blobs = []
        for start, end in segments.pieces(at, len(context)):
            key = self._key(context, end, f"segment {start}")
            blob = segments.to_blob(segments.pack(context, start, end), key, self._identity)
            blobs.append(blob)
            context.stored.append(_stored(blob))
        return blobs

    def _checkpoint_blob(self, context: Context, index: int) -> Blob:
        checkpoint = context.checkpoints[index]
        key = self._key(context, checkpoint.position, "checkpoint")
        return segments.checkpoint_to_blob(checkpoint, key, self._identity)

    def _key(self, context: Context, end: int, what: str) -> str:
        head = f"{self._identity} {context.salt} {what}\n".encode()
        return hashlib.sha256(head + _bytes(context.tokens[:end])).hexdigest()

    def _fetch(self, name: str, started: float) -> Fetched:
        manifest = self._shelf.read(name)
        if manifest.identity != self._identity:
            raise Damaged(
                f"the slot file {name} was saved with another model, adapter or KV precision"
            )
        blobs = tuple(self._read(name, key) for key in manifest.segments)
        marks = tuple(self._read(name, key) for key in manifest.checkpoints)
        _check_cover(name, manifest, blobs)
        return Fetched(name, manifest, blobs, marks, started)

    def _read(self, name: str, key: str) -> Blob:
        try:
            return self._vault.read(self._identity, key)
        except NotFound as error:
            raise Damaged(f"the slot file {name} needs KV that is gone: {error}") from error


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _stored(blob: Blob) -> Stored:
    return Stored(blob.key, blob.start, blob.end, _weight(blob))


def _weight(blob: Blob) -> int:
    return sum(len(plane.data) for plane in blob.planes)


def _check_cover(name: str, manifest: Manifest, blobs: Sequence[Blob]) -> None:
    """The segments follow each other from 0 to the last token."""
    at = 0
    for blob in blobs:
        if not blob.start <= at <= blob.end:
            raise Damaged(f"the slot file {name} has a gap at token {at}")
        at = blob.end
    if at < len(manifest.tokens):
        raise Damaged(f"the slot file {name} ends at token {at} of {len(manifest.tokens)}")
