"""Puts contexts on the shelf and takes them down: parks, stores, resumes.

Belongs to the MLX thread, like the memory it fills.
"""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.request import Request
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import PackedSegment
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.policy import block_hash, kv_records, prefix_index
from mlxstack.policy.block_hash import BlockHashes
from mlxstack.policy.kv_records import KnownPrefix, PathStep, PrefixMatch
from mlxstack.policy.retention import PinnedPrefixName
from mlxstack.policy.reuse_plan import ReusePlan
from mlxstack.policy.shared_prefixes import SharedPrefixes

Piece = tuple[int, int]


class IndexedContext(Struct, frozen=True):
    """A context in the index: its path, its checkpoints, and which of these keys are new."""

    segments: tuple[str, ...]
    checkpoints: tuple[str, ...]
    new: tuple[str, ...]


class ContextParker:
    """`learning` knows what several conversations begin with; that is kept longer."""

    def __init__(self, memory: PrefixCache) -> None:
        self.shared_prefixes = SharedPrefixes(memory.spec.block_size)
        self._memory = memory

    def park(self, context: SlotContext, now: float) -> IndexedContext:
        """Keep a copy of what is not known yet of this context, in memory."""
        shelved = self.index_context(context, now)
        self._memory.pin_in_memory((*shelved.segments, *shelved.checkpoints))
        self._recall(context, shelved, now)
        self._protect(context, shelved, now)
        if context.agent is not None and shelved.segments:
            mark = shelved.checkpoints[-1] if shelved.checkpoints else None
            self._memory.retention.claim(context.agent, shelved.segments[-1], mark)
        return shelved

    def _protect(self, context: SlotContext, shelved: IndexedContext, now: float) -> None:
        """A head that several conversations began with is kept longer, though nobody named it.

        Each time anew: what it was may have been evicted meanwhile.
        """
        retention, heads = self._memory.retention, self.shared_prefixes.named
        known = {name.name: name for name in retention.names}
        for name in known.values():
            if name.is_learned and name.name not in heads:
                retention.unpin(name.name)
        if not shelved.segments or not heads:
            return
        keys = self._memory.chain_of(context).keys
        for title, head in heads.items():
            old = known.get(title)
            is_given = old is not None and not old.is_learned
            if not is_given and keys[head.n_blocks - 1 : head.n_blocks] == (head.key,):
                n_tokens = head.n_blocks * self._memory.spec.block_size
                held = retention.held(shelved.segments[-1], n_tokens)
                since = old.since if old else now
                retention.pin(PinnedPrefixName(title, held, n_tokens, since, is_learned=True))

    def _recall(self, context: SlotContext, shelved: IndexedContext, now: float) -> None:
        """What of the context lies on disk only comes to memory too, without reading it.

        Of a segment that the context left before its end, only the file has the rest.
        """
        for step in prefix_index.reach(self._memory.index, _last(shelved.segments), len(context)):
            record = self._memory.index.nodes[step.key].record
            assert isinstance(record, kv_records.SegmentMeta)
            if self._memory.get(step.key) is None and step.upto == record.end:
                packed = segments.pack(context, record.start, record.end)
                self._memory.put(record, packed, now)
        for part, key in zip(context.checkpoints, shelved.checkpoints, strict=True):
            if self._memory.get(key) is None:
                self._memory.put(self._memory.index.nodes[key].record, part, now)

    def index_context(self, context: SlotContext, now: float) -> IndexedContext:
        """Put what is not known yet of this context into the index, to be written and let go."""
        context.checkpoint()
        chain = self._memory.chain_of(context)
        known = self._memory.match(chain, context.tokens, self._trail(context))
        pieces = segments.pieces(known.covered, len(context))
        new = self._add_segments(context, chain, known, pieces, now)
        leaf = new[-1] if new else known.path[-1].key if known.path else None
        if leaf is None:
            return IndexedContext((), (), ())
        context.set_parent_segment(leaf)
        path = prefix_index.reach(self._memory.index, leaf, len(context))
        marks = [self._add_checkpoint(c, chain, context, path, now) for c in context.checkpoints]
        keys = [key for key, _ in marks]
        new += [key for key, is_new in marks if is_new]
        self._memory.mark_write_through(new)
        return IndexedContext(tuple(step.key for step in path), tuple(keys), tuple(new))

    def index_next(self, context: SlotContext, now: float) -> bool:
        """One piece of what `shelve` would put into the index; False when at most one is left."""
        chain = self._memory.chain_of(context)
        known = self._memory.match(chain, context.tokens, self._trail(context))
        pieces = segments.pieces(known.covered, len(context))
        if len(pieces) < 2:
            return False
        self._memory.mark_write_through(self._add_segments(context, chain, known, pieces[:1], now))
        return True

    def restore_context(
        self, context: SlotContext, request: Request, plan: ReusePlan, now: float
    ) -> None:
        """Make the context the parked prefix of the plan; all its keys are in memory."""
        fresh = context.new_empty(plan.position)
        parts = [self._memory.get(step.key) for step in plan.path]
        spans = segments.whole(
            fresh, [p for p in parts if isinstance(p, PackedSegment)], plan.position
        )
        marks = [self._memory.get(plan.checkpoint)] if plan.checkpoint else []
        fresh.load(
            request.tokens[: plan.position],
            spans,
            [m for m in marks if isinstance(m, StateCheckpoint)],
        )
        context.take_over(fresh)
        context.salt = request.salt
        if plan.path:
            context.set_parent_segment(plan.path[-1].key)
        self._memory.index.touch(plan.keys, now)

    def _add_segments(
        self,
        context: SlotContext,
        chain: BlockHashes,
        known: PrefixMatch,
        pieces: Sequence[Piece],
        now: float,
    ) -> list[str]:
        parent = known.path[-1].key if known.path else None
        size, new = self._memory.spec.block_size, []
        for start, end in pieces:
            key = block_hash.segment_key(block_hash.hash_at(chain, context.tokens, end), start)
            packed = segments.pack(context, start, end)
            names = chain.keys[start // size : end // size]
            record = kv_records.SegmentMeta(key, parent, start, end, packed.n_bytes, names)
            self._memory.put(record, packed, now)
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
        state = block_hash.hash_at(chain, context.tokens, part.position)
        key = block_hash.checkpoint_key(state)
        if key in self._memory.index.nodes:
            return key, False
        parent = next(step.key for step in path if step.start < part.position <= step.upto)
        record = kv_records.CheckpointMeta(key, parent, part.position, part.n_bytes, state)
        self._memory.put(record, part, now)
        return key, True

    def _trail(self, context: SlotContext) -> KnownPrefix | None:
        """Where the context was anchored; for less than a block, a segment of its own is better.

        The one it shares may be long and another agent's, and would be stored and kept with it.
        """
        trail = context.parent_segment()
        return trail if trail and trail.n_common >= self._memory.spec.block_size else None


def _last(keys: Sequence[str]) -> str | None:
    return keys[-1] if keys else None
