"""Records of the prefix cache: segments, checkpoints, the paths through them."""

from enum import StrEnum

from msgspec import Struct, field

MAX_SEGMENT = 2048
"""The longest segment that a file may hold, in tokens."""

CUT = 512
"""Tokens at whose multiples contexts are cut: one piece is packed between two decode steps."""


class StorageTier(StrEnum):
    """Where bytes lie, nearest first."""

    MEMORY = "memory"
    DISK = "disk"


class SegmentMeta(Struct, frozen=True):
    """KV of the tokens [start, end) for the layers that can be cut, end - start <= 2,048.

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

    `parent` is the segment that holds token `position` - 1; `state` names the tokens
    (`blocks.state_at`).
    """

    key: str
    parent: str
    position: int
    n_bytes: int
    state: bytes


Record = SegmentMeta | CheckpointMeta


class IndexEntry(Struct):
    """A record and its mutable state. Only the index and retention change it.

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
        """Whether an agent has a newer state, and no request used or claimed this since."""
        return self.was_left and not (self.agents or self.pins or self.soft_pins)

    @property
    def is_shared(self) -> bool:
        """A head of several conversations: two agents', or one with a learned name."""
        return len(self.agents) > 1 or bool(self.soft_pins)


class PathStep(Struct, frozen=True):
    """One segment of a path, used from its start up to the token position `upto`."""

    key: str
    start: int
    upto: int
    n_bytes: int
    is_parked: bool


class FoundCheckpoint(Struct, frozen=True):
    """A checkpoint that lies on a path."""

    key: str
    position: int
    n_bytes: int
    is_parked: bool


class CheckpointCandidate(Struct, frozen=True):
    """A token position of a prompt, and the name of the tokens before it."""

    position: int
    state: bytes


class KnownPrefix(Struct, frozen=True):
    """The last segment of a context whose tokens are known, and how many a prompt shares."""

    leaf: str
    n_common: int


class PrefixMatch(Struct, frozen=True):
    """The longest known prefix of a prompt: `covered` tokens along `path`, root first."""

    covered: int = 0
    path: tuple[PathStep, ...] = ()
    checkpoints: tuple[FoundCheckpoint, ...] = ()


class Totals(Struct, frozen=True):
    """Bytes by place, and how many segments lie in memory."""

    memory: int = 0
    disk: int = 0
    n_entries: int = 0


def end_of(record: Record) -> int:
    """The token position after the last token of a record."""
    return record.end if isinstance(record, SegmentMeta) else record.position


def check_fit(record: Record, parent: Record | None, block_size: int) -> None:
    """Assert that `record` may hang on `parent`: no gap, no overlap from the parent's start."""
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
