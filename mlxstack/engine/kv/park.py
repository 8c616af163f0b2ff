"""Parking: packs contexts into the prefix cache, and restores them.

Runs on the MLX thread. Long contexts are packed in steps, so that decoding never waits for all.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.interfaces import CallSoon
from mlxstack.core.prompt_tokens import kept
from mlxstack.core.request import Request
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import pieces
from mlxstack.engine.kv.slot_context import KVSources, SlotContext, StateCheckpoint
from mlxstack.policy.kv import block_hash, prefix_index
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.prefix_index import KnownPrefix, PathStep, PrefixMatch
from mlxstack.policy.kv.retention import PinnedPrefixName
from mlxstack.policy.kv.reuse_plan import ReusePlan
from mlxstack.policy.kv.shared_prefixes import SharedPrefixes

Piece = tuple[int, int]


class IndexedContext(Struct, frozen=True):
    """Context in the index: path, checkpoints, and its new keys."""

    segments: tuple[str, ...]
    checkpoints: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.segments, *self.checkpoints)


class ContextParker:
    """Parks and restores contexts; `shared_prefixes` are kept longer than others."""

    def __init__(self, prefix_cache: PrefixCache, shared_prefixes: SharedPrefixes) -> None:
        self.shared_prefixes = shared_prefixes
        self._prefix_cache = prefix_cache

    def park(self, context: SlotContext, now: float) -> IndexedContext:
        """Copy the unknown part of this context to memory."""
        indexed = self.index_context(context, now)
        self._prefix_cache.pin_in_memory(indexed.keys)
        self._recall(context, indexed, now)
        self._protect(context, indexed, now)
        if context.agent is not None and indexed.segments:
            mark = indexed.checkpoints[-1] if indexed.checkpoints else None
            self._prefix_cache.retention.claim(context.agent, indexed.segments[-1], mark)
        return indexed

    def _protect(self, context: SlotContext, indexed: IndexedContext, now: float) -> None:
        """Retain shared prefixes that this context begins with.

        Repeated for each context: the prefix may have been evicted since.
        """
        retention = self._prefix_cache.retention
        prefixes = self.shared_prefixes.named
        names = dict(retention.names)
        for name in names.values():
            if name.is_learned and name.name not in prefixes:
                retention.unpin(name.name)
        if not indexed.segments or not prefixes:
            return
        keys = self._prefix_cache.chain_of(context).keys
        for title, head in prefixes.items():
            old = names.get(title)
            is_given = old is not None and not old.is_learned
            if not is_given and keys[head.n_blocks - 1 : head.n_blocks] == (head.key,):
                n_tokens = head.n_blocks * self._prefix_cache.spec.block_size
                held = retention.held(indexed.segments[-1], n_tokens)
                since = old.since if old else now
                retention.pin(PinnedPrefixName(title, held, n_tokens, since, is_learned=True))

    def _recall(self, context: SlotContext, indexed: IndexedContext, now: float) -> None:
        """Copy a context's records on disk to memory, without a read.

        Where the context left a segment before its end, only the file has the rest.
        """
        last = indexed.segments[-1] if indexed.segments else None
        for step in prefix_index.reach(self._prefix_cache.index, last, len(context)):
            record = self._prefix_cache.index.nodes[step.key].record
            assert isinstance(record, prefix_index.SegmentMeta)
            if self._prefix_cache.get(step.key) is None and step.upto == record.end:
                segment = segments.pack(context, record.start, record.end)
                self._prefix_cache.put(record, segment, now, context)
        for part, key in zip(context.checkpoints, indexed.checkpoints, strict=True):
            if self._prefix_cache.get(key) is None:
                record = self._prefix_cache.index.nodes[key].record
                self._prefix_cache.put(record, part, now, context)

    def index_context(self, context: SlotContext, now: float) -> IndexedContext:
        """Index the unknown part of this context, for writing only."""
        indexed = self.index_segments(context, now)
        return self.index_checkpoints(context, indexed, context.checkpoints, now)

    def index_segments(self, context: SlotContext, now: float) -> IndexedContext:
        """Index all tokens of this context, and take a checkpoint at its end."""
        context.checkpoint()
        chain = self._prefix_cache.chain_of(context)
        match = self._prefix_cache.match(chain, context, self._trail(context))
        pieces = segments.pieces(match.covered, len(context))
        new = self._add_segments(context, chain, match, pieces, now)
        leaf = new[-1] if new else match.path[-1].key if match.path else None
        if leaf is None:
            return IndexedContext((), (), ())
        context.set_parent_segment(leaf)
        self._prefix_cache.mark_write_through(new)
        path = prefix_index.reach(self._prefix_cache.index, leaf, len(context))
        return IndexedContext(tuple(step.key for step in path), (), tuple(new))

    def index_checkpoints(
        self,
        context: SlotContext,
        indexed: IndexedContext,
        checkpoints: Iterable[StateCheckpoint],
        now: float,
    ) -> IndexedContext:
        """Index checkpoints of a context with indexed segments, for writing only."""
        if not indexed.segments:
            return indexed
        chain = self._prefix_cache.chain_of(context)
        path = prefix_index.reach(self._prefix_cache.index, indexed.segments[-1], len(context))
        added = [self._add_checkpoint(c, chain, context, path, now) for c in checkpoints]
        new = tuple(key for key, is_new in added if is_new)
        self._prefix_cache.mark_write_through(new)
        keys = tuple(key for key, _ in added)
        return replace(indexed, checkpoints=keys, new=(*indexed.new, *new))

    def index_next(self, context: SlotContext, now: float) -> bool:
        """Index one piece for `index_context`; False when at most one is left."""
        chain = self._prefix_cache.chain_of(context)
        match = self._prefix_cache.match(chain, context, self._trail(context))
        pieces = segments.pieces(match.covered, len(context))
        if len(pieces) < 2:
            return False
        self._prefix_cache.mark_write_through(
            self._add_segments(context, chain, match, pieces[:1], now)
        )
        return True

    def restore_context(
        self, context: SlotContext, request: Request, plan: ReusePlan, n_room: int, now: float
    ) -> None:
        """Restore the parked prefix of the plan, with room for `n_room` tokens.

        It is in memory.
        """
        fresh = context.new_empty(plan.position)
        checkpoints = (plan.checkpoint,) if plan.checkpoint else ()
        sources = KVSources(tuple(step.key for step in plan.path), checkpoints, fresh.room(n_room))
        parts = map(self._prefix_cache.get, plan.keys)
        segments.load(fresh, kept(request, 0, plan.position), parts, sources)
        context.take_over(fresh)
        context.assign(request.salt, None)
        if plan.path:
            context.set_parent_segment(plan.path[-1].key)
        self._prefix_cache.index.touch(plan.keys, now)

    def _add_segments(
        self,
        context: SlotContext,
        chain: BlockHashes,
        match: PrefixMatch,
        pieces: Sequence[Piece],
        now: float,
    ) -> list[str]:
        parent = match.path[-1].key if match.path else None
        size = self._prefix_cache.spec.block_size
        new = []
        for start, end in pieces:
            key = block_hash.segment_key(block_hash.hash_at(chain, context, end), start)
            segment = segments.pack(context, start, end)
            names = chain.keys[start // size : end // size]
            record = prefix_index.SegmentMeta(key, parent, start, end, segment.n_bytes, names)
            self._prefix_cache.put_segment(record, segment, context, now)
            new.append(key)
            parent = key
        return new

    def _add_checkpoint(
        self,
        part: StateCheckpoint,
        chain: BlockHashes,
        context: SlotContext,
        path: Sequence[PathStep],
        now: float,
    ) -> tuple[str, bool]:
        state = block_hash.hash_at(chain, context, part.position)
        key = block_hash.checkpoint_key(state)
        if key in self._prefix_cache.index.nodes:
            return key, False
        parent = next(step.key for step in path if step.start < part.position <= step.upto)
        record = prefix_index.CheckpointMeta(key, parent, part.position, part.n_bytes, state)
        self._prefix_cache.put(record, part, now, context)
        return key, True

    def _trail(self, context: SlotContext) -> KnownPrefix | None:
        """Position of the parent segment, where it is worth sharing.

        For less than a block, an own segment is better: the parent may be long and another
        agent's, and would be stored and kept with it.
        """
        trail = context.parent_segment()
        if trail and trail.n_common >= self._prefix_cache.spec.block_size:
            return trail
        return None


REST = 2.0
"""Rest after each piece while a slot decodes, in multiples of the time of the piece."""


class IncrementalPack:
    """Packs a context for `ContextParker.index_context`, one piece per step.

    Full memory may evict a piece as soon as it is packed; then `index_context` packs the rest, so
    that packing always ends.
    """

    def __init__(self, context: SlotContext, parker: ContextParker) -> None:
        self._context = context
        self._version = context.version
        self._parker = parker
        self._n_left = len(pieces(0, len(context)))

    @property
    def is_current(self) -> bool:
        """Whether the context is still as it was."""
        return self._context.version == self._version

    def go_on(self) -> bool:
        """Pack a piece; False at the last one or after a change."""
        if self._n_left == 0 or not self.is_current:
            return False
        self._n_left -= 1
        return self._parker.index_next(self._context, time.monotonic())


class BackgroundSteps:
    """Runs long work in steps on the MLX thread, through `post`.

    While `is_decoding`, pauses between the steps bound the delay of tokens.
    """

    def __init__(self, post: CallSoon, is_decoding: Callable[[], bool]) -> None:
        self._post = post
        self._is_decoding = is_decoding

    def run(
        self, step: Callable[[], bool], end: Callable[[], None], fail: Callable[[Exception], None]
    ) -> None:
        """Step until one returns False, then call `end`; `fail` gets an error."""
        began = time.perf_counter()
        try:
            if not step():
                end()
                return
        except Exception as error:
            fail(error)
            raise_device_error(error)
            return
        now = time.perf_counter()
        self._rest(now + REST * (now - began), lambda: self.run(step, end, fail))

    def _rest(self, due: float, go_on: Callable[[], None]) -> None:
        """Continue after `due`, or at once while no slot decodes."""

        def wake() -> None:
            if self._is_decoding() and time.perf_counter() < due:
                self._rest(due, go_on)
            else:
                go_on()

        self._post(wake)
