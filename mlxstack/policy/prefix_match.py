"""Questions to the index: how much of a prompt is known, and along which path."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from mlxstack.policy.kv_records import (
    CheckpointCandidate,
    CheckpointMeta,
    FoundCheckpoint,
    KnownPrefix,
    PathStep,
    PrefixMatch,
    SegmentMeta,
    StorageTier,
    end_of,
)
from mlxstack.policy.prefix_index import PrefixIndex


def match(
    index: PrefixIndex,
    keys: Sequence[bytes],
    cuts: Iterable[CheckpointCandidate] = (),
    trail: KnownPrefix | None = None,
) -> PrefixMatch:
    """The longest known prefix of a prompt; changes nothing. O(log blocks + path + cuts).

    `keys` are the chain keys of its full blocks, `cuts` the positions between blocks where it
    hopes for a checkpoint, `trail` a context whose tokens the caller compared, which is good to
    the token.
    """
    n_known = bisect_left(keys, True, key=lambda block: block not in index.blocks)
    covered = n_known * index.block_size
    leaf = _nearest(index, keys[n_known - 1]) if n_known else None
    for cut in cuts:
        checkpoint = index.states.get(cut.state)
        if checkpoint is not None and cut.position > covered:
            covered, leaf = cut.position, index.nodes[checkpoint].record.parent
    if trail is not None and trail.leaf in index.nodes:
        upto = min(trail.n_common, end_of(index.nodes[trail.leaf].record))
        if upto > covered:
            covered, leaf = upto, trail.leaf
    path = reach(index, leaf, covered)
    return PrefixMatch(covered, path, _checkpoints(index, path, keys[:n_known]))


def reach(index: PrefixIndex, leaf: str | None, upto: int) -> tuple[PathStep, ...]:
    """The path from the root towards the segment `leaf`, cut at the position `upto`. O(path)."""
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
    return tuple(
        PathStep(step.key, step.start, min(step.upto, position), step.n_bytes, step.is_parked)
        for step in path
        if step.start < position
    )


def last_checkpoint(index: PrefixIndex, path: tuple[PathStep, ...]) -> str | None:
    """The checkpoint nearest to the end of a path."""
    found = _checkpoints(index, path, ())
    return found[-1].key if found else None


def was_known(index: PrefixIndex, keys: Sequence[bytes]) -> int:
    """Tokens of the prompt that are known, or were before an eviction not long ago."""
    known = bisect_left(
        keys, True, key=lambda block: block not in index.blocks and block not in index.forgotten
    )
    return known * index.block_size


def _nearest(index: PrefixIndex, block: bytes) -> str:
    """A segment that ends this block, one in memory if there is any."""
    keys = index.blocks[block]
    parked = (key for key in keys if StorageTier.MEMORY in index.nodes[key].tiers)
    return next(parked, next(iter(keys)))


def _checkpoints(
    index: PrefixIndex, path: tuple[PathStep, ...], keys: Sequence[bytes]
) -> tuple[FoundCheckpoint, ...]:
    """Checkpoints on the path, and those that other branches took after the same blocks."""
    found = {index.states[block] for block in keys if block in index.states}
    for step in path:
        found.update(_checkpoints_of(index, step))
    return tuple(sorted((_found(index, key) for key in found), key=lambda f: f.position))


def _checkpoints_of(index: PrefixIndex, step: PathStep) -> list[str]:
    children = ((key, index.nodes[key].record) for key in index.nodes[step.key].children)
    return [
        key
        for key, record in children
        if isinstance(record, CheckpointMeta) and record.position <= step.upto
    ]


def _found(index: PrefixIndex, key: str) -> FoundCheckpoint:
    node = index.nodes[key]
    is_parked = StorageTier.MEMORY in node.tiers
    return FoundCheckpoint(key, end_of(node.record), node.record.n_bytes, is_parked)
