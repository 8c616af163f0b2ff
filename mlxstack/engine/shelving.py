"""Puts contexts on the shelf and takes them down: parks, stores, resumes.

Belongs to the MLX thread, like the memory it fills.
"""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.ask import Ask
from mlxstack.engine import segments
from mlxstack.engine.context import Checkpoint, Context
from mlxstack.engine.learning import Learning
from mlxstack.engine.memory import Memory
from mlxstack.engine.segments import Segment
from mlxstack.policy import blocks, matching, records
from mlxstack.policy.blocks import Chain
from mlxstack.policy.owners import Name
from mlxstack.policy.records import Match, Step, Trail
from mlxstack.policy.restore import Plan

Piece = tuple[int, int]


class Shelved(Struct, frozen=True):
    """A context in the index: its path, its checkpoints, and which of these keys are new."""

    segments: tuple[str, ...]
    checkpoints: tuple[str, ...]
    new: tuple[str, ...]


class Shelving:
    """`learning` knows what several conversations begin with; that is kept longer."""

    def __init__(self, memory: Memory) -> None:
        self.learning = Learning(memory.spec.block_size)
        self._memory = memory

    def park(self, context: Context, now: float) -> Shelved:
        """Keep a copy of what is not known yet of this context, in memory."""
        shelved = self.shelve(context, now)
        self._memory.stay((*shelved.segments, *shelved.checkpoints))
        self._recall(context, shelved, now)
        self._protect(context, shelved, now)
        if context.agent is not None and shelved.segments:
            mark = shelved.checkpoints[-1] if shelved.checkpoints else None
            self._memory.owners.claim(context.agent, shelved.segments[-1], mark)
        return shelved

    def _protect(self, context: Context, shelved: Shelved, now: float) -> None:
        """A head that several conversations began with is kept longer, though nobody named it.

        Each time anew: what it was may have been evicted meanwhile.
        """
        owners, heads = self._memory.owners, self.learning.named
        known = {name.name: name for name in owners.names}
        for name in known.values():
            if name.is_learned and name.name not in heads:
                owners.unpin(name.name)
        if not shelved.segments or not heads:
            return
        keys = self._memory.chain_of(context).keys
        for title, head in heads.items():
            old = known.get(title)
            is_given = old is not None and not old.is_learned
            if not is_given and keys[head.n_blocks - 1 : head.n_blocks] == (head.key,):
                n_tokens = head.n_blocks * self._memory.spec.block_size
                held = owners.held(shelved.segments[-1], n_tokens)
                since = old.since if old else now
                owners.pin(Name(title, held, n_tokens, since, is_learned=True))

    def _recall(self, context: Context, shelved: Shelved, now: float) -> None:
        """What of the context lies on disk only comes to memory too, without reading it.

        Of a segment that the context left before its end, only the file has the rest.
        """
        for step in matching.reach(self._memory.index, _last(shelved.segments), len(context)):
            record = self._memory.index.nodes[step.key].record
            assert isinstance(record, records.Segment)
            if self._memory.array_of(step.key) is None and step.upto == record.end:
                packed = segments.pack(context, record.start, record.end)
                self._memory.keep(record, packed, now)
        for part, key in zip(context.checkpoints, shelved.checkpoints, strict=True):
            if self._memory.array_of(key) is None:
                self._memory.keep(self._memory.index.nodes[key].record, part, now)

    def shelve(self, context: Context, now: float) -> Shelved:
        """Put what is not known yet of this context into the index, to be written and let go."""
        context.checkpoint()
        chain = self._memory.chain_of(context)
        known = self._memory.match(chain, context.tokens, self._trail(context))
        pieces = segments.pieces(known.covered, len(context))
        new = self._add_segments(context, chain, known, pieces, now)
        leaf = new[-1] if new else known.path[-1].key if known.path else None
        if leaf is None:
            return Shelved((), (), ())
        context.anchor(leaf)
        path = matching.reach(self._memory.index, leaf, len(context))
        marks = [self._add_checkpoint(c, chain, context, path, now) for c in context.checkpoints]
        keys = [key for key, _ in marks]
        new += [key for key, is_new in marks if is_new]
        self._memory.pass_through(new)
        return Shelved(tuple(step.key for step in path), tuple(keys), tuple(new))

    def shelve_next(self, context: Context, now: float) -> bool:
        """One piece of what `shelve` would put into the index; False when at most one is left."""
        chain = self._memory.chain_of(context)
        known = self._memory.match(chain, context.tokens, self._trail(context))
        pieces = segments.pieces(known.covered, len(context))
        if len(pieces) < 2:
            return False
        self._memory.pass_through(self._add_segments(context, chain, known, pieces[:1], now))
        return True

    def resume(self, context: Context, ask: Ask, plan: Plan, now: float) -> None:
        """Make the context the parked prefix of the plan; all its keys are in memory."""
        fresh = context.fresh(plan.position)
        parts = [self._memory.array_of(step.key) for step in plan.path]
        spans = segments.whole(fresh, [p for p in parts if isinstance(p, Segment)], plan.position)
        marks = [self._memory.array_of(plan.checkpoint)] if plan.checkpoint else []
        fresh.adopt(
            ask.tokens[: plan.position], spans, [m for m in marks if isinstance(m, Checkpoint)]
        )
        context.become(fresh)
        context.salt = ask.salt
        if plan.path:
            context.anchor(plan.path[-1].key)
        self._memory.index.touch(plan.keys, now)

    def _add_segments(
        self, context: Context, chain: Chain, known: Match, pieces: Sequence[Piece], now: float
    ) -> list[str]:
        parent = known.path[-1].key if known.path else None
        size, new = self._memory.spec.block_size, []
        for start, end in pieces:
            key = blocks.segment_key(blocks.state_at(chain, context.tokens, end), start)
            packed = segments.pack(context, start, end)
            names = chain.keys[start // size : end // size]
            record = records.Segment(key, parent, start, end, packed.n_bytes, names)
            self._memory.keep(record, packed, now)
            new.append(key)
            parent = key
        return new

    def _add_checkpoint(
        self, part: Checkpoint, chain: Chain, context: Context, path: Sequence[Step], now: float
    ) -> tuple[str, bool]:
        state = blocks.state_at(chain, context.tokens, part.position)
        key = blocks.checkpoint_key(state)
        if key in self._memory.index.nodes:
            return key, False
        parent = next(step.key for step in path if step.start < part.position <= step.upto)
        record = records.Checkpoint(key, parent, part.position, part.n_bytes, state)
        self._memory.keep(record, part, now)
        return key, True

    def _trail(self, context: Context) -> Trail | None:
        """Where the context was anchored; for less than a block, a segment of its own is better.

        The one it shares may be long and another agent's, and would be stored and kept with it.
        """
        trail = context.trail()
        return trail if trail and trail.n_common >= self._memory.spec.block_size else None


def _last(keys: Sequence[str]) -> str | None:
    return keys[-1] if keys else None
