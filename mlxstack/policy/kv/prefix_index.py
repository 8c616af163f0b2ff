"""Prefix index: records of cached KV, longest matches, reference counts.

Segments form a tree. A path covers its tokens without a gap: every child starts inside its
parent, and a parent stays as long as it has children. So a known block key implies that all
blocks before it are known, which makes the longest match a binary search (`match`).

One owner, no clock: `now` is an argument, in seconds.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import compress, count
from operator import ne
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from mlxstack.core.prompt_tokens import TokenRow, same_until

MAX_SEGMENT = 2048
"""The longest segment that a file may hold, in tokens."""

CUT = 512
"""Tokens at whose multiples contexts are cut: one piece is packed between two decode steps."""


class StorageTier(StrEnum):
    """Storage tier, nearest first."""

    MEMORY = "memory"
    DISK = "disk"


class SegmentMeta(Struct, frozen=True):
    """KV of [start, end) in cuttable layers, at most 2,048 tokens.

    It continues `parent` from `start`, which may lie anywhere inside the parent. `blocks` are
    the chain keys of the full blocks whose last token lies in the segment.
    """

    key: str
    parent: str | None
    start: int
    end: int
    n_bytes: int
    blocks: tuple[bytes, ...] = ()


class CheckpointMeta(Struct, frozen=True):
    """State of the layers that cannot be cut, after exactly `position` tokens.

    `parent` is the segment that holds token `position` - 1; `state` is the hash of the
    tokens before it.
    """

    key: str
    parent: str
    position: int
    n_bytes: int
    state: bytes


Record = SegmentMeta | CheckpointMeta


class IndexEntry(Struct):
    """Record and its state, changed by the index and retention only.

    `refs` counts users: an entry in use stays. `pins` are names that keep it, `guards` learned
    names that protect it, `agents` those whose newest state includes it.
    """

    record: Record
    tiers: set[StorageTier]
    born_at: float
    used_at: float
    children: set[str] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    pins: set[str] = field(default_factory=set)
    soft_pins: set[str] = field(default_factory=set)
    hits: int = 0
    refs: int = 0
    is_writing: bool = False
    was_left: bool = False

    @property
    def is_superseded(self) -> bool:
        """Whether its agent moved on, and no request used it since."""
        return self.was_left and not (self.agents or self.pins or self.soft_pins)

    @property
    def is_shared(self) -> bool:
        """Whether several agents, or a learned name, share it."""
        return len(self.agents) > 1 or bool(self.soft_pins)


class PathStep(Struct, frozen=True):
    """Segment of a path, used from its start up to `upto`."""

    key: str
    start: int
    upto: int
    n_bytes: int
    is_parked: bool


class RestorePoint(Struct, frozen=True):
    """Position that uncuttable layers have; without `checkpoint` the live state."""

    position: int
    checkpoint: str | None = None
    is_parked: bool = True


class KnownPrefix(Struct, frozen=True):
    """Last known segment of a context, and tokens shared with prompts."""

    leaf: str
    n_common: int


class PrefixMatch(Struct, frozen=True):
    """Longest known prefix of a prompt: `covered` tokens along `path`."""

    covered: int = 0
    path: tuple[PathStep, ...] = ()
    checkpoints: tuple[RestorePoint, ...] = ()


def end_of(record: Record) -> int:
    """The token position after the last token of a record."""
    if isinstance(record, SegmentMeta):
        return record.end
    return record.position


def check_fit(record: Record, parent: Record | None, block_size: int) -> None:
    """Assert that `record` continues `parent` without gap or overlap."""
    if isinstance(record, CheckpointMeta):
        assert isinstance(parent, SegmentMeta)
        assert parent.start < record.position <= parent.end, f"{record.key} is off its segment"
        return
    assert 0 < record.end - record.start <= MAX_SEGMENT, f"{record.key} has a bad length"
    n_blocks = record.end // block_size - record.start // block_size
    assert len(record.blocks) == n_blocks, f"{record.key} names {len(record.blocks)} blocks"
    if parent is None:
        assert record.start == 0, f"{record.key} starts at {record.start} without a parent"
    else:
        assert isinstance(parent, SegmentMeta)
        assert parent.start < record.start <= parent.end, f"{record.key} leaves a gap"


STRIDE = 1024


def common_tokens(row: TokenRow, cached: TokenRow) -> int:
    """Length of the longest common prefix in tokens, of the same images."""
    return same_until(row.images, cached.images, common_prefix(row.tokens, cached.tokens))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix in tokens, compared by slices."""
    end = min(len(a), len(b))
    for start in range(0, end, STRIDE):
        stop = min(start + STRIDE, end)
        left = list(a[start:stop])
        right = list(b[start:stop])
        if left != right:
            return start + next(compress(count(), map(ne, left, right)))
    return end


MAX_FORGOTTEN = 16_384
"""Block keys of evicted segments that are remembered, to explain misses."""


class PrefixIndex:
    """All records and their nodes. Changed by one thread only."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[str, IndexEntry] = {}
        self._blocks: dict[bytes, dict[str, None]] = {}
        self._states: dict[bytes, str] = {}
        self._forgotten: dict[bytes, None] = {}
        self.nodes = MappingProxyType(self._nodes)
        """All nodes by key, to look at."""
        self.blocks = MappingProxyType(self._blocks)
        """Segments with the last token of each block, to look at."""
        self.states = MappingProxyType(self._states)
        """Checkpoint keys by the name of their tokens, to look at."""
        self.forgotten = MappingProxyType(self._forgotten)
        """The last block keys that were evicted, to look at."""
        self.n_evicted = 0
        self.memory_bytes = 0

    def insert(self, record: Record, place: StorageTier, now: float) -> bool:
        """Add a record or tier; False without a change. O(blocks).

        A known checkpoint keeps its first parent.
        """
        node = self._nodes.get(record.key)
        if node is not None and place in node.tiers:
            return False
        if node is None:
            node = self._add(record, now)
        node.tiers.add(place)
        self._count(record, place, 1)
        return True

    def lock(self, keys: Iterable[str]) -> None:
        """Keep these records while in use; every lock needs its unlock."""
        for key in keys:
            self._nodes[key].refs += 1

    def unlock(self, keys: Iterable[str]) -> None:
        """The opposite of `lock`."""
        for key in keys:
            node = self._nodes[key]
            assert node.refs > 0, f"{key} is not locked"
            node.refs -= 1

    def touch(self, keys: Iterable[str], now: float) -> None:
        """These records were hit."""
        for key in keys:
            node = self._nodes[key]
            node.hits += 1
            node.used_at = now
            node.was_left = False

    def set_writing(self, key: str, is_writing: bool) -> None:
        """Set whether the writer holds the bytes, which pins them."""
        self._nodes[key].is_writing = is_writing

    def can_drop(self, key: str, place: StorageTier) -> bool:
        """Whether `place` may drop this record, unused and unneeded."""
        node = self._nodes[key]
        if place not in node.tiers or node.refs or node.is_writing:
            return False
        if len(node.tiers) == 1:
            return not (node.children or node.pins)
        return place is StorageTier.DISK or not node.pins

    def drop(self, key: str, place: StorageTier) -> None:
        """Drop the bytes in `place`; records go with their last. O(blocks)."""
        assert self.can_drop(key, place), f"{key} cannot leave {place}"
        node = self._nodes[key]
        node.tiers.discard(place)
        self._count(node.record, place, -1)
        self.n_evicted += 1
        if not node.tiers:
            self._remove(node.record)

    def _add(self, record: Record, now: float) -> IndexEntry:
        parent = None if record.parent is None else self._nodes[record.parent]
        check_fit(record, parent.record if parent else None, self.block_size)
        node = IndexEntry(record=record, tiers=set(), born_at=now, used_at=now)
        self._nodes[record.key] = node
        if parent is not None:
            parent.children.add(record.key)
        if isinstance(record, CheckpointMeta):
            self._states[record.state] = record.key
            return node
        for block in record.blocks:
            self._blocks.setdefault(block, {})[record.key] = None
            self._forgotten.pop(block, None)
        return node

    def _count(self, record: Record, place: StorageTier, sign: int) -> None:
        if place is StorageTier.MEMORY:
            self.memory_bytes += sign * record.n_bytes

    def _remove(self, record: Record) -> None:
        del self._nodes[record.key]
        if record.parent is not None:
            self._nodes[record.parent].children.discard(record.key)
        if isinstance(record, CheckpointMeta):
            del self._states[record.state]
            return
        for block in record.blocks:
            del self._blocks[block][record.key]
            if not self._blocks[block]:
                del self._blocks[block]
                self._forgotten[block] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]


def match(
    index: PrefixIndex,
    keys: Sequence[bytes],
    cuts: Iterable[tuple[int, bytes]] = (),
    trail: KnownPrefix | None = None,
) -> PrefixMatch:
    """Longest known prefix; read-only. O(log blocks + path + cuts).

    `keys` are the hashes of its full blocks, `cuts` the positions between blocks of possible
    checkpoints with the hashes before them, `trail` a context whose tokens the caller compared,
    exact to the token.
    """
    n_known = bisect_left(keys, True, key=lambda block: block not in index.blocks)
    covered = n_known * index.block_size
    leaf = None
    if n_known:
        leaf = _nearest(index, keys[n_known - 1])
    for position, state in cuts:
        checkpoint = index.states.get(state)
        if checkpoint is not None and position > covered:
            covered = position
            leaf = index.nodes[checkpoint].record.parent
    if trail is not None and trail.leaf in index.nodes:
        upto = min(trail.n_common, end_of(index.nodes[trail.leaf].record))
        if upto > covered:
            covered = upto
            leaf = trail.leaf
    path = reach(index, leaf, covered)
    return PrefixMatch(covered, path, _checkpoints(index, path, keys[:n_known]))


def reach(index: PrefixIndex, leaf: str | None, upto: int) -> tuple[PathStep, ...]:
    """Path from the root to `leaf`, cut at `upto`. O(path)."""
    steps: list[PathStep] = []
    while leaf is not None:
        node = index.nodes[leaf]
        record = node.record
        assert isinstance(record, SegmentMeta), f"{leaf} is no segment"
        if record.start < upto:
            upto = min(upto, record.end)
            is_parked = StorageTier.MEMORY in node.tiers
            steps.append(PathStep(leaf, record.start, upto, record.n_bytes, is_parked))
            upto = record.start
        leaf = record.parent
    return tuple(reversed(steps))


def cut_path(path: tuple[PathStep, ...], position: int) -> tuple[PathStep, ...]:
    """The part of a path that covers the first `position` tokens."""
    steps = (step for step in path if step.start < position)
    return tuple(replace(step, upto=min(step.upto, position)) for step in steps)


def last_checkpoint(index: PrefixIndex, path: tuple[PathStep, ...]) -> str | None:
    """The checkpoint nearest to the end of a path."""
    return next(reversed(checkpoints_on(index, path)), None)


def checkpoints_on(index: PrefixIndex, path: tuple[PathStep, ...]) -> tuple[str, ...]:
    """Keys of the checkpoints on a path, ascending."""
    points = _checkpoints(index, path, ())
    return tuple(point.checkpoint for point in points if point.checkpoint is not None)


def was_known(index: PrefixIndex, keys: Sequence[bytes]) -> int:
    """Known tokens of the prompt, including those evicted recently."""
    n_blocks = bisect_left(
        keys, True, key=lambda block: block not in index.blocks and block not in index.forgotten
    )
    return n_blocks * index.block_size


def _nearest(index: PrefixIndex, block: bytes) -> str:
    """Segment that ends this block, preferably one in memory."""
    keys = index.blocks[block]
    parked = (key for key in keys if StorageTier.MEMORY in index.nodes[key].tiers)
    return next(parked, next(iter(keys)))


def _checkpoints(
    index: PrefixIndex, path: tuple[PathStep, ...], keys: Sequence[bytes]
) -> tuple[RestorePoint, ...]:
    """Checkpoints on the path, and other branches' after the same blocks."""
    checkpoint_keys = {index.states[block] for block in keys if block in index.states}
    for step in path:
        checkpoint_keys.update(_checkpoints_of(index, step))
    nodes = sorted((index.nodes[key] for key in checkpoint_keys), key=lambda n: end_of(n.record))
    return tuple(
        RestorePoint(end_of(node.record), node.record.key, StorageTier.MEMORY in node.tiers)
        for node in nodes
    )


def _checkpoints_of(index: PrefixIndex, step: PathStep) -> list[str]:
    children = ((key, index.nodes[key].record) for key in index.nodes[step.key].children)
    return [
        key
        for key, record in children
        if isinstance(record, CheckpointMeta) and record.position <= step.upto
    ]
