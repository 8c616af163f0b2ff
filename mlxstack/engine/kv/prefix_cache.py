"""Prefix cache: parked KV in memory, with index, retention and eviction.

Runs on the MLX thread.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.core.prompt_tokens import KeptTokens, TokenRow, kept, same_until
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.policy.kv import block_hash, eviction, prefix_index, prefix_index_check
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.eviction import MemoryPressure
from mlxstack.policy.kv.parking import MIN_PARKED
from mlxstack.policy.kv.prefix_index import (
    KnownPrefix,
    PrefixIndex,
    PrefixMatch,
    RestorePoint,
    StorageTier,
    common_prefix,
    common_tokens,
)
from mlxstack.policy.kv.retention import Retention
from mlxstack.policy.kv.reuse_plan import ReusePlan

SLACK = 0.05
"""Extra share of the budget per eviction, so that few are needed."""


class PrefixCache:
    """Prefix cache: the arrays of all records in memory, and their index.

    `budget` is bytes for live contexts, parked ones and pending writes together. Contexts shorter
    than `quantized_start` are not quantized yet.
    """

    def __init__(
        self, identity: str, spec: PrefixCacheSpec, budget: int, quantized_start: int = 0
    ) -> None:
        self.spec = spec
        self.budget = budget
        self.quantized_start = quantized_start
        self.index = PrefixIndex(spec.block_size)
        self.retention = Retention(self.index)
        self.identity = identity
        self._kept: dict[str, Segment | StateCheckpoint] = {}
        self._held: set[int] = set()
        self._transient: set[str] = set()
        self._off_disk: set[str] = set()
        self._ends: dict[int, dict[str, int]] = {}
        """Start of every segment and checkpoint that ends inside a block, by its end and key."""
        self._tokens: dict[str, KeptTokens] = {}
        """Tokens of the segments that were parked here; files do not hold them."""
        self._short: dict[bytes, dict[str, None]] = {}
        """Those that are whole contexts of less than a block, by the root of their hashes."""

    @property
    def n_bytes(self) -> int:
        """Bytes of arrays in memory, without those of live contexts."""
        return self.index.memory_bytes

    def missing(self, plan: ReusePlan) -> list[str]:
        """Keys of the plan that are on disk only."""
        return [key for key in plan.keys if key not in self._kept]

    def get(self, key: str) -> Segment | StateCheckpoint | None:
        """The arrays of a record that lies in memory."""
        return self._kept.get(key)

    def parked_tokens(self, key: str) -> Sequence[int]:
        """Tokens of a segment parked in this run; empty for others."""
        parked = self._tokens.get(key)
        return () if parked is None else parked.tokens

    def contains(self, part: Segment | StateCheckpoint) -> bool:
        """Whether these very arrays lie here."""
        return id(part) in self._held

    def put(
        self,
        record: prefix_index.Record,
        part: Segment | StateCheckpoint,
        now: float,
        context: SlotContext | None = None,
    ) -> None:
        """Hold the arrays of a record, from `context` or from disk."""
        self.insert(record, StorageTier.MEMORY, now)
        self._let_go(record.key)
        self._kept[record.key] = part
        self._held.add(id(part))

    def note_unused(self, key: str) -> None:
        """Note that what was read of this key is not put; for subclasses."""

    def put_segment(
        self, record: prefix_index.SegmentMeta, part: Segment, context: SlotContext, now: float
    ) -> None:
        """Put a segment of a context, whose tokens are known."""
        self.put(record, part, now, context)
        parked = kept(context, part.start, part.end)
        self._tokens[record.key] = KeptTokens(array("I", parked.tokens), parked.images)
        if record.start == 0 and record.end < self.spec.block_size:
            self._short.setdefault(self.chain_of(context).root, {})[record.key] = None

    def mark_write_through(self, keys: Iterable[str]) -> None:
        """These are in memory only to be written."""
        self._transient.update(keys)

    def pin_in_memory(self, keys: Iterable[str]) -> None:
        """These stay in memory, also when they are on disk."""
        self._transient.difference_update(keys)

    def keep_off_disk(self, keys: Iterable[str]) -> None:
        """These are parked, and not worth their bytes on disk."""
        self._off_disk.update(keys)

    def is_off_disk(self, key: str) -> bool:
        """Whether a record is to stay in memory alone."""
        return key in self._off_disk

    def on_disk(self, record: prefix_index.Record, now: float) -> None:
        """Mark a record as on disk; write-through ones leave memory."""
        self.insert(record, StorageTier.DISK, now)
        if record.key in self._transient:
            self._transient.discard(record.key)
            self._drop(record.key, StorageTier.MEMORY)

    def invalidate(self, key: str) -> None:
        """Invalidate a lost file, and all records that need it."""
        node = self.index.nodes.get(key)
        if node is None:
            return
        if StorageTier.MEMORY in node.tiers:
            self._drop(key, StorageTier.DISK)
        else:
            self.invalidate_all(key)

    def invalidate_all(self, key: str) -> None:
        """Invalidate a record and all that continue it, in every tier."""
        doomed = [key]
        for lost_key in doomed:
            doomed.extend(self.index.nodes[lost_key].children)
        for lost_key in reversed(doomed):
            # A write under way holds its own bytes, and what it writes needs what is lost.
            self.index.set_writing(lost_key, False)
            self.retention.forget(lost_key)
            for place in tuple(self.index.nodes[lost_key].tiers):
                self._drop(lost_key, place)

    def is_on_disk(self, key: str) -> bool:
        """Whether a known record is on disk."""
        return StorageTier.DISK in self.index.nodes[key].tiers

    def release(self, keys: Sequence[str]) -> int:
        """Release unclaimed records from memory, root first; the bytes freed."""
        before = self.n_bytes
        for key in reversed(keys):
            if not self.index.nodes[key].agents:
                self._drop(key, StorageTier.MEMORY)
        return before - self.n_bytes

    def make_room(self, live_bytes: int, pressure: MemoryPressure = MemoryPressure.CALM) -> int:
        """Evict until live and parked bytes fit the budget; bytes freed."""
        before = self.n_bytes
        over = live_bytes + before - self.budget
        if (
            over <= 0
            and len(self._kept) <= self.spec.max_entries
            and pressure is MemoryPressure.CALM
        ):
            return 0
        goal = eviction.EvictionGoal(
            n_bytes=over + int(SLACK * self.budget) if over > 0 else 0,
            max_entries=self.spec.max_entries,
            policy=self.spec.eviction_policy,
            pressure=pressure,
        )
        for key in eviction.plan(eviction.entries(self.index), goal):
            self._drop(key, StorageTier.MEMORY)
        return before - self.n_bytes

    def _let_go(self, key: str) -> None:
        """Remove a record's arrays from memory, if present."""
        self._held.discard(id(self._kept.pop(key, None)))

    def _drop(self, key: str, place: StorageTier) -> None:
        """Forget what lies in this place, if it may go."""
        node = self.index.nodes.get(key)
        if node is None or not self.index.can_drop(key, place):
            return
        self.index.drop(key, place)
        if place is StorageTier.MEMORY:
            self._let_go(key)
        if key not in self.index.nodes:
            self._transient.discard(key)
            self._off_disk.discard(key)
            self._tokens.pop(key, None)
            for short in self._short.values():
                short.pop(key, None)
            self._ends.get(prefix_index.end_of(node.record), {}).pop(key, None)

    def match(self, chain: BlockHashes, row: TokenRow, trail: KnownPrefix | None) -> PrefixMatch:
        """Longest known prefix, up to the token in its last segment.

        A segment beyond the last known block ends before the next block would be full.
        """
        match = prefix_index.match(self.index, chain.keys, trail=trail)
        size = self.spec.block_size
        last = min(match.covered // size, len(chain.keys))
        cuts: list[tuple[int, bytes]] = []
        for end in range(last * size + 1, min((last + 1) * size, chain.n_tokens + 1)):
            if end not in self._ends:
                continue
            state = block_hash.hash_at(chain, row, end)
            cuts.append((end, state))
            if end <= match.covered:
                continue
            for start in set(self._ends[end].values()):
                key = block_hash.segment_key(state, start)
                if key in self._ends[end]:
                    trail = KnownPrefix(key, end)
        match = prefix_index.match(self.index, chain.keys, cuts, trail)
        return replace(match, checkpoints=self._of_these_tokens(match.checkpoints, chain, row))

    def _of_these_tokens(
        self, points: Sequence[RestorePoint], chain: BlockHashes, row: TokenRow
    ) -> tuple[RestorePoint, ...]:
        """Restore points whose state fits the tokens before them.

        The position of a file is not hashed in its key.
        """

        def is_sound(point: RestorePoint) -> bool:
            if point.checkpoint is None:
                return True
            record = self.index.nodes[point.checkpoint].record
            assert isinstance(record, prefix_index.CheckpointMeta)
            return record.state == block_hash.hash_at(chain, row, point.position)

        return tuple(point for point in points if is_sound(point))

    def match_in_block(self, match: PrefixMatch, chain: BlockHashes, row: TokenRow) -> PrefixMatch:
        """Extend a match into the next block, up to the divergence."""
        nodes = self.index.nodes
        n_full = match.covered // self.spec.block_size
        if n_full:
            last = self.index.blocks.get(chain.keys[n_full - 1], ())
            reached = dict.fromkeys(last, n_full * self.spec.block_size)
        else:
            reached = dict.fromkeys(self._short_segments(chain.root, row), 0)
        if match.path:
            reached[match.path[-1].key] = match.covered
        longest = match.covered
        leaf = ""
        queue = list(reached)
        for key in queue:
            if key in self._tokens:
                own = self._tokens[key]
                start = prefix_index.end_of(nodes[key].record) - len(own.tokens)
                tail = kept(row, start, chain.n_tokens)
                upto = start + common_prefix(own.tokens, tail.tokens)
                reached[key] = max(reached[key], same_until(own.images, tail.images, upto))
                longest, leaf = max((longest, leaf), (reached[key], key))
            for child in nodes[key].children:
                if child in reached or child not in self._tokens:
                    continue
                start = prefix_index.end_of(nodes[child].record) - len(self._tokens[child].tokens)
                if start <= reached[key]:
                    reached[child] = start
                    queue.append(child)
        if leaf:
            return self.match(chain, row, KnownPrefix(leaf, longest))
        return match

    def _short_segments(self, root: bytes, row: TokenRow) -> Iterator[str]:
        """Parked contexts of less than a block that begin as these tokens."""
        for key in self._short.get(root, ()):
            if common_tokens(self._tokens[key], row) >= MIN_PARKED:
                yield key

    def insert(self, record: prefix_index.Record, place: StorageTier, now: float) -> None:
        """Index a record in this tier, and its end inside a block."""
        self.index.insert(record, place, now)
        end = prefix_index.end_of(record)
        if end % self.spec.block_size:
            start = record.start if isinstance(record, prefix_index.SegmentMeta) else 0
            self._ends.setdefault(end, {})[record.key] = start

    def check(self) -> None:
        """Assert that index and arrays agree. O(records + blocks)."""
        prefix_index_check.check_index(self.index, self.retention)
        parked = {key for key, node in self.index.nodes.items() if StorageTier.MEMORY in node.tiers}
        assert parked == set(self._kept), f"{len(parked ^ set(self._kept))} arrays are amiss"

    def chains(self, row: TokenRow, tenant: str) -> tuple[BlockHashes, ...]:
        """Block hashes of these tokens for this tenant.

        Where KV is quantized from a position on, the second one is that of shorter contexts.
        """
        whole = block_hash.extend(self._root(tenant, self.quantized_start), row)
        if not self.quantized_start:
            return (whole,)
        return whole, block_hash.extend(self._root(tenant, 0), row, self.quantized_start - 1)

    def chain_of(self, context: SlotContext) -> BlockHashes:
        """Block hashes of a context; only new tokens are hashed."""
        start = self._root(context.salt, len(context))
        chain = context.chain
        if chain is None or chain.root != start.root:
            chain = start
        context.chain = block_hash.extend(chain, context)
        return context.chain

    def _root(self, tenant: str, n_tokens: int) -> BlockHashes:
        """Block hashes of no tokens, for contexts of `n_tokens`.

        Contexts too short to be quantized have another root: their KV is of another kind.
        """
        identity = self.identity
        if n_tokens < self.quantized_start:
            # Not in the tenant's salt: that may be any text.
            identity = f"{identity} short"
        return block_hash.start(block_hash.salt(identity, tenant), self.spec.block_size)
